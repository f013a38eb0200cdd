"""What is minimised, and how: the loss on marked tokens, Muon and AdamW."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from training.sequences import ANSWER, Batch

WEIGHTS = (0.0, 1.0, 0.7, 0.3)
"""Loss weight of each mark of `Batch.loss`: none, answer, rest of the answer, name."""


def optimizers(
    model: LlamaForCausalLM, muon_rate: float, adam_rate: float
) -> list[torch.optim.Optimizer]:
    """Muon for the trained matrices, AdamW for embeddings, biases and norms."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in named if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(
        matrices,
        lr=muon_rate,
        momentum=0.95,
        weight_decay=0.01,
        adjust_lr_fn="original",
    )
    adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


def answer_loss(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, float]:
    """(weighted mean loss over marked tokens, share of answers whose first token is right)."""
    # An explicit mask: without one, transformers would take gaps in the positions for the borders
    # of packed sequences.
    hidden = model.model(
        input_ids=batch.ids,
        attention_mask=torch.ones_like(batch.ids),
        position_ids=batch.positions,
        use_cache=False,
    ).last_hidden_state
    marks = batch.loss[:, 1:]
    chosen = marks > 0
    logits = model.lm_head(hidden[:, :-1][chosen]).float()
    target = batch.ids[:, 1:][chosen]
    first = marks[chosen] == ANSWER
    weights = logits.new_tensor(WEIGHTS)[marks[chosen]]
    right = (logits.detach().argmax(-1) == target)[first].float().mean()
    losses = F.cross_entropy(logits, target, reduction="none")
    return (losses * weights).sum() / weights.sum(), float(right)
