"""A model's reasoning: its markers in prompts and output, and what holds an output to them.

The markers are single tokens. Whether a prompt ends inside the reasoning is read from its last tokens, where
a user's text cannot stand: templates close the message before they open the assistant's turn.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tokenizers import Tokenizer

from triptych.base.errors import ConfigError, RequestError
from triptych.base.types import ReasoningMarkers
from triptych.pd_worker.frontend.grammar import FormatState

_THINK = ReasoningMarkers("<think>", "</think>")
#: By the names of `--reasoning-parser`; vLLM's names of parsers with the same markers are taken too.
PARSERS = {
    "think": _THINK,
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "gemma4": ReasoningMarkers("<|channel>", "<channel|>", label="thought\n"),
    "kimi": ReasoningMarkers("◁think▷", "◁/think▷"),
    "minimax_m3": ReasoningMarkers("<mm:think>", "</mm:think>"),
    "cohere_command3": ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
}
_THINKERS = "qwen3 deepseek_r1 deepseek_v3 glm45 glm47 step3 step3p5 minimax_m2 kimi_k2 ernie45 nemotron_v3"
_ALIASES = dict.fromkeys(_THINKERS.split(), "think") | {"cohere_command4": "cohere_command3"}
#: Tokens of white space that a template may write after a marker.
_MAX_BLANKS = 3

Mask = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


class ReasoningPhase(enum.Enum):
    #: The first token of the output decides.
    OPEN = enum.auto()
    REASONING = enum.auto()
    ANSWER = enum.auto()


class Reasoning:
    """The reasoning markers of one checkpoint."""

    def __init__(self, markers: ReasoningMarkers, tokenizer: Tokenizer) -> None:
        """ConfigError where the markers are not tokens of the checkpoint."""
        start, end = tokenizer.token_to_id(markers.start), tokenizer.token_to_id(markers.end)
        if start is None or end is None:
            raise ConfigError(
                f"--reasoning-parser: {markers.start} and {markers.end} are no tokens of this checkpoint: "
                "use auto or none"
            )
        self.start, self.end = start, end
        self.markers = markers
        self.size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._tokenizer = tokenizer

    @property
    def tokens(self) -> frozenset[int]:
        """The ids of both markers."""
        return frozenset((self.start, self.end))

    def phase(self, prompt_token_ids: Sequence[int]) -> ReasoningPhase:
        """Where the output of this prompt begins."""
        for token in reversed(prompt_token_ids[-1 - _MAX_BLANKS :]):
            if token == self.start:
                return ReasoningPhase.REASONING
            if token == self.end:
                return ReasoningPhase.ANSWER
            if self._tokenizer.decode([token], skip_special_tokens=False).strip():
                break
        return ReasoningPhase.OPEN

    def told(self, phase: ReasoningPhase) -> ReasoningMarkers | None:
        """What tells reasoning from answer in the output's text; None where it has no reasoning."""
        return (
            None
            if phase is ReasoningPhase.ANSWER
            else replace(self.markers, begun=phase is ReasoningPhase.REASONING)
        )


class ReasoningMask:
    """Holds an output to a `budget` of reasoning tokens, and its answer to a `grammar`, from its first token.

    In the reasoning a grammar only forbids the end of the whole output.
    """

    def __init__(
        self,
        reasoning: Reasoning,
        phase: ReasoningPhase,
        grammar: FormatState | None,
        budget: int | None,
        eos_token_ids: Sequence[int],
    ) -> None:
        size = reasoning.size
        self._reasoning = reasoning
        self._phase = phase
        self._grammar = grammar
        self._budget = budget
        self._consumed = 0
        #: Reasoning tokens so far, the start marker not counted; where the answer begins in the output.
        self._spent = 0
        self._answer = 0
        self._only_end = np.zeros(size, dtype=bool)
        self._only_end[reasoning.end] = True
        self._no_eos = np.ones(size, dtype=bool)
        self._no_eos[[token for token in eos_token_ids if token < size]] = False

    @property
    def error(self) -> RequestError | None:
        return None if self._grammar is None else self._grammar.error

    def follow(self, output_ids: Sequence[int]) -> bool:
        """Advances by the new ids; False where the answer does not match its grammar."""
        for index in range(self._consumed, len(output_ids)):
            self._advance(output_ids[index], index)
        self._consumed = len(output_ids)
        if self._grammar is None or self._phase is not ReasoningPhase.ANSWER:
            return True
        return self._grammar.follow(output_ids[self._answer :])

    def allowed(self, output_ids: Sequence[int]) -> Mask | None:
        """The allowed next ids, bool [ids of the tokenizer]; None: all of them, or after an error."""
        self.follow(output_ids)
        if self._phase is ReasoningPhase.REASONING:
            if self._budget is not None and self._spent >= self._budget:
                return self._only_end
            return None if self._grammar is None else self._no_eos
        if self._grammar is None:
            return None
        mask = self._grammar.allowed(output_ids[self._answer :])
        if self._phase is ReasoningPhase.OPEN and mask is not None:
            mask[self._reasoning.start] = True
        return mask

    def _advance(self, token: int, index: int) -> None:
        if self._phase is ReasoningPhase.OPEN:
            self._phase = (
                ReasoningPhase.REASONING if token == self._reasoning.start else ReasoningPhase.ANSWER
            )
        elif self._phase is ReasoningPhase.REASONING and token == self._reasoning.end:
            self._phase, self._answer = ReasoningPhase.ANSWER, index + 1
        elif self._phase is ReasoningPhase.REASONING:
            self._spent += 1


def check_reasoning_parser(parser: str) -> None:
    """ConfigError for a name that does not exist."""
    if parser not in (names := ("auto", "none", *PARSERS, *_ALIASES)):
        raise ConfigError(f"--reasoning-parser {parser!r} must be one of {', '.join(names)}")


def find_reasoning(parser: str, template: str, tokenizer: Tokenizer) -> Reasoning | None:
    """The reasoning of a checkpoint as `--reasoning-parser` names it; "auto" by its chat template.

    ConfigError for a name that does not exist, or markers that the checkpoint does not have.
    """
    if parser == "none":
        return None
    if parser == "auto":
        for markers in PARSERS.values():
            known = tokenizer.token_to_id(markers.start), tokenizer.token_to_id(markers.end)
            if markers.end in template and None not in known:
                return Reasoning(markers, tokenizer)
        return None
    check_reasoning_parser(parser)
    return Reasoning(PARSERS[_ALIASES.get(parser, parser)], tokenizer)
