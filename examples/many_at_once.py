"""Asks one question about many pictures at once: python examples/many_at_once.py QUESTION PICTURE…"""

from __future__ import annotations

import asyncio
import sys

import triptych


async def main(question: str, *pictures: str, url: str = "http://127.0.0.1:8000") -> list[str]:
    async with triptych.AsyncClient(url) as client:
        asked = [client.ask(question, files=[picture], temperature=0, max_tokens=64) for picture in pictures]
        return await asyncio.gather(*asked)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python examples/many_at_once.py QUESTION PICTURE…")
    for answer in asyncio.run(main(*sys.argv[1:])):
        sys.stdout.write(answer + "\n")
