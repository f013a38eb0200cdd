import pytest
from transformers import PreTrainedTokenizerFast

from training.tokens import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()
