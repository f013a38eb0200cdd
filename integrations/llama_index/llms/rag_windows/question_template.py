"""Whether a template can be asked over windows."""

from __future__ import annotations

from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate

from llama_index.llms.rag_windows.base import RagWindowsLLM
from rag_windows.errors import InputError

_FILLED = {"context_str", "query_str"}


def checked(template: BasePromptTemplate, llm: RagWindowsLLM) -> BasePromptTemplate:
    """The template itself, if nothing of it or of a request would be lost.

    Raises:
        InputError: it has no open place for the question or the passages; it has variables that
            nobody fills; or it rewrites the passages with a function.
    """
    if not isinstance(template, BasePromptTemplate):
        raise InputError(
            f"A template must be a PromptTemplate or ChatPromptTemplate, not "
            f"{type(template).__name__}; use PromptTemplate(text)."
        )
    chosen = template.select(llm) if isinstance(template, SelectorPromptTemplate) else template
    functions = set(chosen.function_mappings or {})
    if "context_str" in functions:
        raise InputError(
            "The template rewrites context_str with a function, but passages become windows "
            "before there is a context_str. Change the nodes in a node postprocessor instead."
        )
    renamed = {new: old for old, new in (chosen.template_var_mappings or {}).items()}
    names = {renamed.get(name, name) for name in chosen.template_vars}
    for name, what in (("query_str", "question"), ("context_str", "passages")):
        if name not in names or name in chosen.kwargs:
            raise InputError(
                f"The template has no open place for the {what}, which would be dropped; put "
                f"{{{name}}} where the {what} would stand in one prompt."
            )
    open_names = sorted(names - _FILLED - functions - set(chosen.kwargs))
    if open_names:
        raise InputError(
            f"The template has variables that nobody fills: {open_names}. Fill them with "
            "template.partial_format(...)."
        )
    return template
