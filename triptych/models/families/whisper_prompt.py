"""Whisper's decoder prompts: language, task, timestamps, and the text before."""

from __future__ import annotations

from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from triptych.base.errors import InvalidRequest
from triptych.base.types import Options
from triptych.models.base import GenerationDefaults, LogitsRule, PromptDefaults
from triptych.models.families.logits_rules import Only, Timestamps, checkpoint_rules

TASKS = ("transcribe", "translate")


class WhisperPrompts:
    """The prompts of a checkpoint, by its `generation` config. Options, all of them optional:

    `language` (a code, an English name or the token's text; English by default), `task`,
    `timestamps`, `prompt_ids` (tokens of text that went before), `detect_language` (the prompt is the start
    token alone, and the only output that counts is a language's token).
    """

    def __init__(self, start: int, generation: Options, max_positions: int) -> None:
        self.start = start
        self.languages: dict[str, int] = dict(generation.get("lang_to_id") or {})
        self.tasks: dict[str, int] = dict(generation.get("task_to_id") or {})
        self.multilingual = bool(generation.get("is_multilingual", bool(self.languages))) and bool(
            self.languages
        )
        self.no_timestamps: int | None = generation.get("no_timestamps_token_id")
        self._language = generation.get("language") or "en"
        self._last_initial = generation.get("max_initial_timestamp_index")
        suppressed = list(generation.get("suppress_tokens") or ())
        before = generation.get("prev_sot_token_id")
        # `generate` finds the token there when the checkpoint does not name it.
        self._before = suppressed[-2] if before is None and len(suppressed) > 1 else before
        self._most_before = max_positions // 2 - 1

    def of(self, options: Options) -> PromptDefaults:
        """The decoder prompt. InvalidRequest(param: the option) for what this checkpoint cannot do."""
        ids = [self.start]
        if options.get("detect_language"):
            self._check_multilingual("detect_language")
            return PromptDefaults(self.start, (self.start,))
        language, task = options.get("language") or "", options.get("task") or "transcribe"
        if task not in TASKS:
            raise InvalidRequest(f"task: {task!r} is none of {', '.join(TASKS)}", param="task")
        if self.multilingual:
            ids.append(self.language_id(language or self._language))
            if task in self.tasks:
                ids.append(self.tasks[task])
        elif task == "translate":
            self._check_multilingual("task")
        elif language and _code(language) != "en":
            self._check_multilingual("language")
        if options.get("timestamps"):
            self._first_time()
        elif self.no_timestamps is not None:
            ids.append(self.no_timestamps)
        return PromptDefaults(self.start, (*self._previous(options), *ids))

    def language_id(self, language: str) -> int:
        """The token of a language; InvalidRequest, naming those known, for another."""
        token = self.languages.get(f"<|{_code(language)}|>")
        if token is None:
            known = ", ".join(sorted(name.strip("<|>") for name in self.languages))
            raise InvalidRequest(
                f"language: {language!r} is unknown; this model has {known}", param="language"
            )
        return token

    def language_of(self, token_id: int) -> str | None:
        """The code of the language that a token names; None for any other token."""
        return next((name.strip("<|>") for name, token in self.languages.items() if token == token_id), None)

    def rules(self, defaults: GenerationDefaults, options: Options) -> tuple[LogitsRule, ...]:
        """The checkpoint's rules and those of the task."""
        if options.get("detect_language"):
            return (Only(tuple(self.languages.values())),)
        rules = checkpoint_rules(defaults, options)
        if not options.get("timestamps"):
            return rules
        eos = defaults.eos_token_ids[0] if defaults.eos_token_ids else 0
        return (*rules, Timestamps(self._first_time(), eos, self._last_initial))

    def _previous(self, options: Options) -> tuple[int, ...]:
        given = tuple(options.get("prompt_ids") or ())
        if not given:
            return ()
        if self._before is None:
            raise InvalidRequest("prompt: this model has no token for previous text", param="prompt")
        return (int(self._before), *given[-self._most_before :])

    def _first_time(self) -> int:
        if self.no_timestamps is None:
            raise InvalidRequest(
                "timestamps: this checkpoint's generation_config names no no_timestamps_token_id",
                param="timestamps",
            )
        return self.no_timestamps + 1

    def _check_multilingual(self, param: str) -> None:
        if not self.multilingual:
            raise InvalidRequest(
                f"{param}: this model knows English only: use POST /v1/audio/transcriptions, and leave "
                "language out or send en",
                param=param,
            )


def _code(language: str) -> str:
    name = language.strip().lower().strip("<|>")
    return str(TO_LANGUAGE_CODE.get(name, name))
