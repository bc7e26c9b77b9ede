"""Fields that change an answer in ways that are not served: refused by name instead of passed over."""

from __future__ import annotations

import msgspec

from triptych.base.errors import InvalidRequest

_ADVICE = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "audio": "answers are text",
    "web_search_options": "the server searches nothing",
    "documents": "put their text into messages",
    "chat_template": "the checkpoint's template is used; chat_template_kwargs are passed to it",
    "use_beam_search": "use n",
    "best_of": "use n",
    "echo": "the prompt is not repeated",
    "prompt_logprobs": "only output tokens have logprobs",
    "truncate_prompt_tokens": "shorten messages",
    "allowed_token_ids": "use logit_bias",
    "logits_processors": "use logit_bias",
    "guided_grammar": "use guided_json, guided_regex or guided_choice",
    "guided_whitespace_pattern": "use guided_regex",
    "structural_tag": "use response_format",
    "return_tokens_as_token_ids": "use return_token_ids",
    "add_special_tokens": "the chat template writes them",
    "kv_transfer_params": "the cluster decides itself what goes where",
}


class UnservedBody(msgspec.Struct, kw_only=True):
    """Fields of OpenAI and vLLM that are refused unless they are off: null, false, 0 or empty."""

    functions: object = None
    function_call: object = None
    audio: object = None
    web_search_options: object = None
    documents: object = None
    chat_template: object = None
    use_beam_search: object = None
    best_of: object = None
    echo: object = None
    prompt_logprobs: object = None
    truncate_prompt_tokens: object = None
    allowed_token_ids: object = None
    logits_processors: object = None
    guided_grammar: object = None
    guided_whitespace_pattern: object = None
    structural_tag: object = None
    return_tokens_as_token_ids: object = None
    add_special_tokens: object = None
    kv_transfer_params: object = None
    skip_special_tokens: object = None
    modalities: object = None


def refuse_unserved(body: UnservedBody, served: frozenset[str] = frozenset()) -> None:
    """InvalidRequest when the body asks for something that is not served; `served` names exceptions."""
    for name, advice in _ADVICE.items():
        value = getattr(body, name)
        if value and name not in served and not (name == "best_of" and value == 1):
            raise InvalidRequest(f"{name} is not supported: {advice}", param=name)
    if body.skip_special_tokens is False:
        raise InvalidRequest(
            "skip_special_tokens: special tokens are never part of the text; see return_token_ids",
            param="skip_special_tokens",
        )
    if body.modalities not in (None, [], ["text"]):
        raise InvalidRequest('modalities must be ["text"]', param="modalities")
