"""Asks a cluster about a picture: python examples/ask.py PICTURE QUESTION [URL]"""

from __future__ import annotations

import sys

import triptych


def main(picture: str, question: str, url: str = "http://127.0.0.1:8000") -> str:
    with triptych.Client(url) as client:
        return client.ask(question, files=[picture], temperature=0, max_tokens=64)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python examples/ask.py PICTURE QUESTION [URL]")
    sys.stdout.write(main(*sys.argv[1:]) + "\n")
