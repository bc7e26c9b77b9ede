"""Shows an answer as it comes: python examples/stream.py PICTURE QUESTION [URL]"""

from __future__ import annotations

import sys

import triptych


def main(picture: str, question: str, url: str = "http://127.0.0.1:8000") -> str:
    pieces = []
    with triptych.Client(url) as client:
        for chunk in client.stream(question, files=[picture], temperature=0, max_tokens=64):
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            pieces.append(chunk.text)
    sys.stdout.write("\n")
    return "".join(pieces)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python examples/stream.py PICTURE QUESTION [URL]")
    main(*sys.argv[1:])
