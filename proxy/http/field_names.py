"""The names of a body's fields: known here, documented by other servers, or misspelt."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache

import msgspec

from triptych.base.request import unknown_field

HEADER = b"x-triptych-ignored-fields"
#: Fields of OpenAI and vLLM that change nothing here, which is said in docs/api.md: they are never refused.
WITHOUT_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prediction"),
        *("reasoning_effort", "verbosity", "request_id", "length_penalty", "early_stopping"),
        "guided_decoding_backend",
    )
)
#: Fields that other servers document: never a misspelling, however near to one that is known here. Of
#: OpenAI and OpenRouter; Anthropic; vLLM; SGLang; llama.cpp; TGI and TEI; Ollama; Jina and Cohere.
_ELSEWHERE = """
access_programs api_base api_key approximate audio background best_of chunking_strategy compact_threshold
context_management conversation country dimensions echo encoding_format fallbacks file frequency_penalty
function_call functions image images include include_obfuscation include_reasoning input instructions
known_speaker_names known_speaker_references language languages logit_bias logprobs max_completion_tokens
max_output_tokens max_price max_tokens max_tool_calls messages modalities model models n parallel_tool_calls
plugins presence_penalty preset previous_response_id prompt prompt_cache_options prompt_cache_retention
provider reasoning response_format route seed session_id stop stream stream_options structured_outputs
suffix
temperature text timestamp_granularities tool_choice tools top_a top_k top_logprobs top_p transforms
truncation voice web_search_options
betas cache_control container inference_geo mcp_servers output_config output_format speed stop_sequences
system
thinking
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
chat_template_kwargs continue_final_message documents ec_transfer_params embed_dtype embedding_types
enable_response_messages endianness guided_choice guided_grammar guided_json guided_regex
guided_whitespace_pattern hotwords ignore_eos include_stop_str_in_output input_type kv_transfer_params
logits_processors media_io_kwargs min_p min_tokens mm_processor_kwargs normalize pooling
previous_input_messages
prompt_embeds prompt_logprobs repetition_detection repetition_penalty return_mm_kwargs return_token_ids
return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval
structural_tag thinking_token_budget to_language truncate_prompt_tokens truncation_side use_activation
use_beam_search use_audio_in_video vad_filter vllm_xargs
bootstrap_host bootstrap_port bootstrap_room custom_logit_processor custom_params data_parallel_rank ebnf
extra_key image_data audio_data video_data input_ids json_schema lora_path max_dynamic_patch
min_dynamic_patch
no_stop_trim regex return_hidden_states return_routed_experts rid sampling_params separate_reasoning
session_params stop_regex stream_reasoning
cache_prompt dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers
dynatemp_exponent dynatemp_range grammar id_slot ignore_eos lora min_keep mirostat mirostat_eta mirostat_tau
n_indent n_keep n_predict n_probs parse_tool_calls post_sampling_probs reasoning_format repeat_last_n
repeat_penalty response_fields return_progress return_tokens samplers t_max_predict_ms tfs_z
thinking_forced_open timings_per_token top_n_sigma typical_p xtc_probability xtc_threshold
adapter_id decoder_input_details details do_sample inputs max_new_tokens parameters prompt_name raw_scores
return_full_text return_text texts tool_prompt top_n_tokens truncate truncation_direction watermark
format keep_alive num_ctx num_keep num_predict options raw template think
citation_options late_chunking max_chunks_per_doc max_tokens_per_doc output_dimension output_dtype
overlap_tokens query rank_fields return_documents safety_mode strict_tools task text_1 text_2 top_n
"""
DOCUMENTED = WITHOUT_EFFECT | frozenset(_ELSEWHERE.split())
#: Unknown names of one body that are compared with known ones, on the event loop, and shown.
_MAX_NAMES = 16
_MAX_BYTES = 512
_SHORTEST = 3
_LONGEST = 64
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def names_of(raw: bytes) -> Collection[str]:
    """The members of a JSON object, whose values are passed over."""
    return _members.decode(raw).keys()


def ignored_header(
    names: Iterable[str], known: tuple[str, ...], *, reject: bool
) -> tuple[tuple[bytes, bytes], ...]:
    """The header that names those that are not `known`, if any.

    InvalidRequest for one that is misspelt, and with `reject` for any that would change the answer elsewhere.
    """
    ignored = [name for name in names if name not in known]
    for name in ignored[: None if reject else _MAX_NAMES]:
        if name not in WITHOUT_EFFECT and (reject or is_misspelt(name, known)):
            raise unknown_field(name, known, "leave it out (--unknown-fields)")
    shown = ", ".join(re.sub(r"[^!-+\--~]", "?", name[:64]) for name in ignored[:_MAX_NAMES])
    return ((HEADER, shown.encode()[:_MAX_BYTES]),) if ignored else ()


@lru_cache(maxsize=4096)
def is_misspelt(name: str, known: tuple[str, ...]) -> bool:
    """Whether an unknown name is one edit from a known one, two from eight letters on.

    An edit is a letter more, less, other, or two in the other order; capitals count as small letters.
    """
    if name in DOCUMENTED or not _SHORTEST <= len(name) <= _LONGEST:
        return False
    edits = 2 if len(name) >= 8 else 1
    small, letters = name.lower(), set(name.lower())
    # An edit brings one letter and takes one at most: few known names are left to compare.
    few = (it for it in known if max(len(letters - set(it)), len(set(it) - letters)) <= edits)
    return any(_is_near(small, it, edits) for it in few if abs(len(name) - len(it)) <= edits)


def _is_near(one: str, other: str, edits: int) -> bool:
    """Whether the edit distance of two texts, with swaps, is at most `edits`: 0 to 2."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    one, other = one[same:], other[same:]
    if not one or not other or not edits:
        return len(one) + len(other) <= edits
    tries = [(one[1:], other), (one, other[1:]), (one[1:], other[1:])]
    if one[:2] == other[1::-1]:
        tries.append((one[2:], other[2:]))
    return any(_is_near(*it, edits - 1) for it in tries)
