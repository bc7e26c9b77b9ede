"""A multipart/form-data body as fields and files; it has arrived whole, within the body limits."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from triptych.base.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# It warns of every broken form, which would let clients write the log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

MAX_PARTS = 64
#: Bytes of one part's headers, and of one field that is no file.
MAX_HEADER = 4096
MAX_FIELD = 64 << 10
_ASK = "send multipart/form-data, as curl -F does"


@dataclass(slots=True)
class Form:
    """Values by field name, in order; of files their bytes. InvalidRequest names the field."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def one(self, name: str) -> str:
        """The field's value; empty when it is not there."""
        values = self.fields.get(name, [])
        if len(values) > 1:
            raise InvalidRequest(f"{name} is there {len(values)} times: send it once", param=name)
        return values[0] if values else ""

    def all(self, name: str) -> list[str]:
        """The values of a field that may repeat, with [] behind its name or without."""
        return [*self.fields.get(name, []), *self.fields.get(f"{name}[]", [])]


def parse_form(content_type: bytes, body: bytes) -> Form:
    """The body's parts. InvalidRequest for a body that is not a form, or has too many or too large fields."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind.strip().lower() != b"multipart/form-data" or not boundary:
        raise InvalidRequest(f"the request body is not a form: {_ASK}", param="body")
    reader = _FormReader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError) as error:
        raise InvalidRequest(f"the form cannot be read ({error}): {_ASK}", param="body") from None
    if not reader.ended:
        raise InvalidRequest(f"the form breaks off: {_ASK}", param="body")
    return reader.form


class _FormReader:
    """Takes the parser's callbacks."""

    def __init__(self) -> None:
        self.form = Form()
        self.ended = False
        self._parts = 0
        self._name = ""
        self._is_file = False
        self._data: list[bytes] = []
        self._size = 0
        self._header = b""
        self._value = b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._part_data,
            "on_part_end": self._end,
            "on_end": self._form_end,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequest(f"a form takes at most {MAX_PARTS} fields", param="body")
        self._name, self._is_file, self._data, self._size = "", False, [], 0

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header = self._grown(self._header, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value = self._grown(self._value, data[start:end])

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            self._is_file = b"filename" in options
        self._header = self._value = b""

    def _headers_end(self) -> None:
        if not self._name:
            raise InvalidRequest("a part of the form has no name", param="body")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if not self._is_file and self._size > MAX_FIELD:
            raise InvalidRequest(f"{self._name[:80]} has more than {MAX_FIELD} bytes", param=self._name[:80])
        self._data.append(data[start:end])

    def _end(self) -> None:
        data = b"".join(self._data)
        self._data = []
        if self._is_file:
            if self._name in self.form.files:
                raise InvalidRequest(
                    f"{self._name[:80]} is there twice: send one file", param=self._name[:80]
                )
            self.form.files[self._name] = data
            return
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"{self._name[:80]} is not UTF-8 text", param=self._name[:80]) from None
        self.form.fields.setdefault(self._name, []).append(text)

    def _form_end(self) -> None:
        self.ended = True

    @staticmethod
    def _grown(known: bytes, more: bytes) -> bytes:
        if len(known) + len(more) > MAX_HEADER:
            raise InvalidRequest("a part of the form has too long a header", param="body")
        return known + more
