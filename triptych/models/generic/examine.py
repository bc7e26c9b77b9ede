"""The examination of a class: from its config alone, on meta, before a weight is read.

It says whether the adapter can serve the class, and all that it has to know of it. What is not known is
refused here, by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from triptych.base.errors import ConfigError, reason_of
from triptych.models.generic.capture import CapturedPrompt, Container, PromptCapture, modality_tokens
from triptych.models.generic.masks import ask_every_pair, span_rule, spans_of
from triptych.models.generic.probe import check_layer_types, layer_rules, probe, recurrent_layers
from triptych.models.generic.sides import base_of, decoder_of, empty_model, keep_decoder, modality_of
from triptych.models.geometry import DecoderGeometry, LayerRule, SpanRule

#: Placeholder tokens that the sample's picture may have: its grid is the same, classes count differently.
_SAMPLE_ROWS = range(1, 17)
#: A window and a chunk so short that the sample's spans are longer.
_SHORT = 2
#: Tokens of the sample of a text.
_TEXT = 7


@dataclass(frozen=True, slots=True)
class Examined:
    """What is known of a class. `embedded` maps placeholder ids to those that they are embedded as.

    `container` and `takes_inputs` are as the capture has learnt them. `one_item`: a picture's rows depend on
    how many the prompt has. `plain`: the class gives its decoder nothing of a prompt but embeddings.
    `counts_text`: of a prompt without items it gives nothing else but positions that count from 0, unless one
    of `marks` is in it.
    `type_names` and `grid_names` are what the class takes of its processor's output beside pixels.
    `modalities` are those of its items, `silence` says why sound is not among them.
    """

    geometry: DecoderGeometry
    rules: tuple[LayerRule, ...]
    embedded: Mapping[int, int]
    container: tuple[Container, Container]
    takes_inputs: bool
    one_item: bool
    plain: bool
    counts_text: bool
    marks: frozenset[int]
    type_names: tuple[str, ...]
    grid_names: tuple[str, ...]
    modalities: tuple[str, ...]
    silence: str


def examine(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    capture_class: type[PromptCapture] = PromptCapture,
) -> Examined:
    """ConfigError, with what is not known by its name, for a class that the adapter cannot serve.

    `dtype` is that of the weights, for the states of recurrent layers.
    """
    model = empty_model(config)
    name, decoder = type(model).__name__, decoder_of(model)
    text: Any = decoder.config
    check_layer_types(name, text)
    modality = modality_of(model)
    one_item = check_getter(model, modality)
    # As a PD worker holds it: what its shells need of a tower would fail there.
    keep_decoder(model)
    names = inspect.signature(decoder.forward).parameters
    levels = deepstack_levels(config) if "deepstack_visual_embeds" in names else 0
    capture = capture_class(model, modality, levels)
    sample, prompt = _sample(capture, config, text)
    if prompt.levels != levels:
        raise ConfigError(f"{name}: its decoder takes {prompt.levels} deepstack levels, not {levels}")
    rows = 1 if prompt.positions is None else prompt.positions.shape[0]
    inputs = {key: value[:2] for key, value in prompt.inputs.items()}
    width = int(model.get_input_embeddings().embedding_dim)
    if recurrent_layers(text):
        decoder.to(dtype)
    calls, states = probe(name, decoder, width, rows, inputs)
    if not prompt.masks and not all(call.causal for call in calls):
        raise ConfigError(f"{name}: all tokens attend to one another, also those of a text: not served yet")
    shapes = tuple(call.shape for call in calls)
    attending = next(call for call in calls if call.heads)
    first = attending.shape
    equal = all(shape == first for shape in shapes) and first.key_dim == first.value_dim
    silence = "" if modality == "audio" else _why_silent(capture, sample, config)
    visual = () if modality == "audio" else ("image", "video")
    marks = _marks_of(config)
    return Examined(
        DecoderGeometry(
            num_layers=len(calls),
            num_heads=attending.heads,
            num_kv_heads=first.heads,
            head_dim=first.key_dim,
            hidden_size=width,
            vocab_size=int(text.vocab_size),
            position_rows=rows,
            max_position_embeddings=_max_length(text),
            deepstack_levels=levels,
            kv_shapes=() if equal else shapes,
            states=states,
        ),
        layer_rules(text, calls, _span_rules(name, capture, sample)),
        _embedded(capture, config),
        capture.container,
        bool(prompt.inputs),
        one_item,
        prompt.positions is None and not (prompt.masks or prompt.inputs or capture.takes_details),
        _counts_text(capture, marks),
        marks,
        capture.type_names,
        capture.grid_names,
        visual if silence else (*visual, "audio"),
        silence,
    )


def check_getter(model: PreTrainedModel, modality: str) -> bool:
    """Whether a prompt may have one item only, whose rows depend on how many there are.

    ConfigError for a class that takes no pictures or sounds, whose placeholder is not known, or whose rows
    depend on the prompt's text.
    """
    name, getter = type(model).__name__, getattr(base_of(model), f"get_{modality}_features", None)
    if getter is None:
        raise ConfigError(
            f"{name} takes text alone, or attends to pictures within its layers (it has no "
            "get_image_features and no get_audio_features): serve it with vLLM or SGLang"
        )
    if modality not in modality_tokens(model.config):
        raise ConfigError(f"{name}: its config.json names no {modality}_token_id")
    names = inspect.signature(getter).parameters
    if text := [each for each in names if each.endswith("input_ids")]:
        raise ConfigError(
            f"{name}: an item's rows depend on the prompt ({', '.join(text)}): it cannot be served"
        )
    return "batch_num_images" in names


def _why_silent(capture: PromptCapture, sample: _Sample, config: Any) -> str:
    """Why the class's prompts hold no sounds beside its pictures; empty where they do."""
    token = modality_tokens(config).get("audio")
    if token is None or not capture.hears:
        return "it has no getter of sound's features, or names no token for them"
    ids = tuple(token if each == capture.token else each for each in sample.token_ids)
    try:
        capture.run(ids, torch.zeros_like(sample.types), others={"audio": [sample.rows]})
    except Exception as error:  # of any kind: code of the class
        return reason_of(error)
    return ""


def deepstack_levels(config: Any) -> int:
    """Levels of features that a picture's rows have beyond their first."""
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


@dataclass(frozen=True, slots=True)
class _Sample:
    token_ids: tuple[int, ...]
    types: torch.Tensor
    rows: int
    grids: Mapping[str, torch.Tensor]


def _sample(capture: PromptCapture, config: Any, text: Any) -> tuple[_Sample, CapturedPrompt]:
    """A prompt with one picture that the class accepts, and what it feeds its decoder."""
    failure: Exception | None = None
    for sample in _samples(capture, config):
        try:
            return sample, capture.learn(sample.token_ids, sample.types, sample.rows, sample.grids)
        except ConfigError:
            raise
        except Exception as error:  # of any kind: code of the class
            failure = failure or error
    reason = " ".join(f"{type(failure).__name__} {failure}".split())[:300]
    raise ConfigError(f"{capture.name} cannot be admitted by capture ({reason}): it cannot be served")


def _samples(capture: PromptCapture, config: Any) -> Iterator[_Sample]:
    image, vision = capture.token, getattr(config, "vision_config", None)
    start, end = (_marker(config, which) for which in ("start", "end"))
    merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", None) or 2
    grids = {}
    if "image_grid_thw" in capture.grid_names:
        grids["image_grid_thw"] = torch.tensor([[1, 2 * merge, 2 * merge]])
    if "target_sizes" in capture.grid_names:
        grids["target_sizes"] = torch.tensor([[8, 8]])
    used = {image, *start, *end}
    plain = [token for token in range(3, 20) if token not in used]
    for rows in (4, *_SAMPLE_ROWS):
        ids = (*plain[:3], *start, *[image] * rows, *end, *plain[3:6])
        types = torch.tensor([[int(token == image) for token in ids]] * len(capture.type_names))
        yield _Sample(ids, types, rows, grids)


def _marks_of(config: PreTrainedConfig) -> frozenset[int]:
    """The tokens that the config or a part of it names: of a prompt's ids a class asks for no others.

    Nor for those that begin and end a text, which stand in every conversation.
    """
    parts: list[Any] = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    named = {id(part): vars(part).items() for part in parts if part is not None}
    return frozenset(
        number
        for name, value in chain.from_iterable(named.values())
        if re.search(r"_(id|ids|index)$", name) and name not in ("bos_token_id", "eos_token_id")
        for number in (value if isinstance(value, list | tuple) else [value])
        if isinstance(number, int)
    )


def _counts_text(capture: PromptCapture, marks: frozenset[int]) -> bool:
    """Whether a prompt of text gives the decoder embeddings of its ids and positions that count from 0."""
    ids = [token for token in range(_TEXT + len(marks)) if token not in marks][:_TEXT]
    try:
        prompt = capture.run(ids, torch.zeros(len(capture.type_names), _TEXT, dtype=torch.int64))
    except Exception:  # of any kind: a class may refuse a text without a picture
        return False
    positions, counted = prompt.positions, torch.arange(_TEXT)
    return (
        (positions is None or torch.equal(positions, counted.expand_as(positions)))
        and torch.equal(prompt.embedded, torch.tensor(ids))
        and not (prompt.spans or prompt.inputs)
    )


def _marker(config: Any, which: str) -> tuple[int, ...]:
    names = (f"vision_{which}_token_id", f"image_{which}_token_id", f"im_{which}_id")
    return next(((int(value),) for name in names if (value := getattr(config, name, None)) is not None), ())


def _max_length(text: Any) -> int:
    """Positions that the model has; of Llama 4 those before its temperature is tuned by a token's index.

    It counts the tokens of a forward for it, in which those of other requests stand, too.
    """
    length = int(text.max_position_embeddings)
    return min(length, int(text.floor_scale)) if getattr(text, "attn_temperature_tuning", False) else length


def _span_rules(name: str, capture: PromptCapture, sample: _Sample) -> dict[str, SpanRule]:
    """The rule of each layer type, from the class's own masks of the sample under a short window.

    In some classes a type of 0 is what attends both ways.
    """
    try:
        return _rules_of(name, capture, sample)
    except ConfigError:
        rules = _rules_of(name, capture, replace(sample, types=torch.zeros_like(sample.types)))
        if set(rules.values()) <= {SpanRule.NONE}:
            raise
        return rules


def _rules_of(name: str, capture: PromptCapture, sample: _Sample) -> dict[str, SpanRule]:
    text = capture.config.get_text_config()
    changed = [
        (config, limit, getattr(config, limit))
        for config in {id(each): each for each in (text, capture.decoder_config)}.values()
        for limit in ("sliding_window", "attention_chunk_size")
        if getattr(config, limit, None) is not None
    ]
    for config, limit, _ in changed:
        setattr(config, limit, _SHORT)
    configs = (capture.config, text, capture.decoder_config)
    try:
        for config in configs:
            ask_every_pair(config, on=True)
        prompt = capture.run(sample.token_ids, sample.types, [sample.rows], sample.grids)
    finally:
        for config in configs:
            ask_every_pair(config, on=False)
        for config, limit, value in changed:
            setattr(config, limit, value)
    spans = spans_of({kind: mask.diagonal(1) for kind, mask in prompt.masks.items()})
    rules = {}
    for kind, mask in prompt.masks.items():
        window = _SHORT if kind == "sliding_attention" else None
        rule = span_rule(mask, spans, window, _SHORT if kind == "chunked_attention" else None)
        if rule is None:
            raise ConfigError(
                f"{name}: the mask of its {kind} layers follows no known rule: it cannot be served"
            )
        rules[kind] = rule
    return rules


def _embedded(capture: PromptCapture, config: Any) -> dict[int, int]:
    """Placeholder ids that are embedded as another id, where no picture is given for them."""
    ids = sorted(set(modality_tokens(config).values()))
    types = torch.zeros(len(capture.type_names), len(ids), dtype=torch.int64)
    try:
        prompt = capture.run(ids, types)
    except ConfigError:
        raise
    except Exception:  # of any kind: a class may refuse placeholders without media
        return {}
    pairs = zip(ids, prompt.embedded.tolist(), strict=True)
    return {token: embedded for token, embedded in pairs if token != embedded}
