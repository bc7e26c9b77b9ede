"""Grammar-constrained output: the allowed next tokens, by llguidance's incremental parser.

llguidance is imported with the first request that needs it. It works under limits of its own for grammar
size, lexer states and work per step; what goes beyond them is the request's error, never a hang.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from triptych.base.config import PDConfig
from triptych.base.errors import InvalidRequest, RequestError
from triptych.base.request import MAX_CHOICE_TEXTS, MAX_DEPTH, MAX_FORMAT
from triptych.base.types import OutputFormat
from triptych.pd_worker.core.request import TokenMask
from triptych.pd_worker.frontend.call_grammar import CALLS, call_grammar
from triptych.pd_worker.frontend.closed_schema import closed_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions
    from tokenizers import Tokenizer

_FIELD = "response_format"
_MAX_CACHED = 32
#: Functions, and characters of all their schemas, that are tried one by one for which of them is refused:
#: with more, a refusal would take several times the work.
_MAX_TRIED, _MAX_TRIED_TEXT = 16, 1 << 14
#: No blanks between the parts of JSON: a small model would write little else.
_OPTIONS: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}


class FormatState(TokenMask, Protocol):
    """Constraint on one request's output, which follows the output of earlier attempts."""

    def follow(self, output_ids: Sequence[int]) -> bool:
        """Advances by the new ids; False where they do not match."""
        ...


class CompiledState(FormatState, Protocol):
    """The constraint of a format; `output_format` is what it holds to: a schema may have been closed."""

    output_format: OutputFormat


class Formats(Protocol):
    """Makes the constraints of output formats; `after_reasoning`: they leave a model's reasoning free."""

    after_reasoning: bool

    def state(self, output_format: OutputFormat) -> CompiledState:
        """The state before the first token; InvalidRequest for what is not supported."""
        ...


class GrammarState:
    """Parser state of one request's output; follows the output ids, those of earlier attempts too.

    `error` is set once the output cannot match the format.
    """

    def __init__(
        self, matcher: LLMatcher, output_format: OutputFormat, eos_token_ids: Sequence[int], size: int
    ) -> None:
        self.output_format = output_format
        self._matcher = matcher
        self._eos = [token for token in eos_token_ids if token < size]
        self._size = size
        self._consumed = 0
        self.error: RequestError | None = None

    def follow(self, output_ids: Sequence[int]) -> bool:
        """Advances by the new ids; False where they do not match, which sets `error`."""
        new = list(output_ids[self._consumed :])
        self._consumed = len(output_ids)
        if new and self.error is None and not self._matcher.consume_tokens(new):
            self._fail()
        return self.error is None

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray | None:
        """The allowed next ids, bool [ids of the tokenizer]; None after an error."""
        if not self.follow(output_ids):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self._fail()
            return None
        allowed = np.unpackbits(bits, bitorder="little", count=self._size).astype(bool)
        allowed[self._eos] = self._matcher.is_accepting()
        return allowed

    def _fail(self) -> None:
        self.error = _refusal(f"the output cannot be held to it: {_first_line(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles output formats, with an LRU cache. Thread-safe.

    `eos_token_ids` end an output once it matches completely, and not before. Schemas are closed, unless
    `closes` is false or their own format is open.
    """

    after_reasoning = True

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], *, closes: bool = True) -> None:
        self._closes = closes
        self._backend = tokenizer
        self._eos = tuple(eos_token_ids)
        self._size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[OutputFormat, tuple[LLMatcher, OutputFormat]] = OrderedDict()

    def state(self, output_format: OutputFormat) -> GrammarState:
        """The state before the first token; InvalidRequest for what is not supported."""
        if not self._eos:
            raise _refusal("this model has no end-of-sequence token to end such an output with")
        with self._lock:
            made = self._compiled.get(output_format)
        if made is None:
            made = self._compile(output_format)
        with self._lock:
            self._compiled[output_format] = made
            self._compiled.move_to_end(output_format)
            while len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
            copy = made[0].deep_copy()
        return GrammarState(copy, made[1], self._eos, self._size)

    def _compile(self, output_format: OutputFormat) -> tuple[LLMatcher, OutputFormat]:
        """The matcher, and the format that it is of."""
        if output_format.kind == CALLS:
            return self._calls(output_format.text), output_format
        if self._closes and output_format.kind == "json_schema" and not output_format.open:
            closed = closed_schema(_read_schema(output_format.text))
            form = replace(output_format, text=json.dumps(closed, ensure_ascii=False), open=True)
            with contextlib.suppress(InvalidRequest):
                return self._matcher(_schema(closed)), form
            # Bounds that the parser takes nowhere are no reason to refuse what the client has written.
        return self._matcher(_grammar(output_format)), output_format

    def _calls(self, text: str) -> LLMatcher:
        """The matcher of calls; InvalidRequest names the function whose schema alone is refused, too."""
        schemas = json.loads(text)
        try:
            return self._matcher_of(schemas)
        except InvalidRequest:
            if len(text) > _MAX_TRIED_TEXT:
                raise
            held = ((name, schema) for name, schema in schemas.items() if schema is not None)
            for name, schema in islice(held, _MAX_TRIED):
                try:
                    self._matcher_of({name: schema})
                except InvalidRequest as error:
                    reason = error.message.removeprefix(f"{_FIELD}: ")
                    raise _refusal(f"the parameters of {name}: {reason}") from error
            raise

    def _matcher_of(self, schemas: Mapping[str, Any]) -> LLMatcher:
        from llguidance import LLMatcher

        checked = {name: schema if schema is None else _checked(schema) for name, schema in schemas.items()}
        if self._closes:
            checked = {name: schema and closed_schema(schema) for name, schema in checked.items()}
        return self._matcher(str(LLMatcher.grammar_from_lark(call_grammar(checked, self._backend))))

    def _matcher(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=_limits())
        # Some formats prove too large, or unsatisfiable, only at the first step.
        probe = matcher.deep_copy()
        if not probe.is_error():
            probe.compute_bitmask()
        if probe.is_error():
            raise _refusal(_first_line(probe.get_error()))
        return matcher

    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                spec = self._backend.to_str()
                self._tokenizer = LLTokenizer(spec, n_vocab=self._size, eos_token=self._eos[0])
            return self._tokenizer


def compiler_of(config: PDConfig, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> GrammarCompiler:
    """The compiler of a PD worker with these flags."""
    return GrammarCompiler(tokenizer, eos_token_ids, closes=config.schemas == "closed")


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    # Fuel is llguidance's unit of work: 50 of the first and 14 of the second are about a microsecond.
    return LLParserLimits(
        max_grammar_size=100_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_lexer_states=25_000,
    )


def _grammar(output_format: OutputFormat) -> str:
    from llguidance import LLMatcher

    match output_format.kind:
        case "json_object":
            return _schema({"type": "object"})
        case "json_schema":
            return _schema(_read_schema(output_format.text))
        case "regex":
            _check_size(output_format.text)
            return str(LLMatcher.grammar_from_regex(_unanchored(output_format.text)))
        case "choices":
            return str(LLMatcher.grammar_from_lark(_choices(output_format.choices)))
    raise _refusal(f"unknown kind {output_format.kind[:64]!r}")


def _read_schema(text: str) -> dict[str, Any]:
    """The schema in a client's text; InvalidRequest for what is none, or too large."""
    _check_size(text)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"the schema is no JSON: {_first_line(str(error))}") from error
    return _checked(schema)


def _checked(schema: object) -> dict[str, Any]:
    """The schema without what is no part of JSON schema; InvalidRequest for none, or one too deep."""
    if not isinstance(schema, dict):
        raise _refusal("the schema must be a JSON object")
    if _deeper(schema, MAX_DEPTH):
        raise _refusal(f"the schema is nested deeper than {MAX_DEPTH}")
    # The client's own settings for the parser.
    return {name: value for name, value in schema.items() if name != "x-guidance"}


def _schema(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS))
    except ValueError as error:
        raise _refusal(_first_line(str(error))) from error


def _choices(choices: Sequence[str]) -> str:
    """A grammar whose only texts are these."""
    if not 0 < len(choices) <= MAX_CHOICE_TEXTS or not all(choices):
        raise _refusal(f"choices takes 1 to {MAX_CHOICE_TEXTS} texts, none of them empty")
    _check_size("".join(choices))
    return "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))


def _check_size(text: str) -> None:
    if not 0 < len(text) <= MAX_FORMAT:
        raise _refusal(f"a schema, regular expression or list of choices has 1 to {MAX_FORMAT} characters")


def _unanchored(regex: str) -> str:
    """The whole output has to match anyway: anchors at both ends mean nothing."""
    regex = regex.removeprefix("^")
    return re.sub(r"(?<!\\)((?:\\\\)*)\$\Z", r"\1", regex)


def _deeper(value: object, levels: int) -> bool:
    if levels == 0:
        return isinstance(value, dict | list)
    inner: Iterable[object] = ()
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
    return any(_deeper(part, levels - 1) for part in inner)


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"{_FIELD}: {reason}", param=_FIELD)


def _first_line(text: str) -> str:
    """The parser's complaint on one line; keywords of schemas that it lacks by their names.

    Of a regular expression it draws the place and says what is wrong in the last line.
    """
    if "regex parse error" in text and (reason := re.search(r"^error: (.+)$", text, re.MULTILINE)):
        drawn = text.partition("regex parse error:")[2].strip().split("\n", 1)[0]
        return f"the regular expression {drawn[:200]} cannot be read: {reason[1][:90]}"
    if text.startswith("NoExtension"):
        return "no text fits it: does a part need itself, as by $ref, without an end?"
    line = text.strip().split("\n", 1)[0][:300]
    if lacking := re.findall(r'"([^"]+)"', line.partition("Unimplemented keys:")[2]):
        names = f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'}"
        return f"{names} not supported in a schema: docs/api.md#structured-output lists what is"
    return line
