"""The same with the openai package: python examples/openai_package.py PICTURE QUESTION [URL]"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from openai import OpenAI


def main(picture: str, question: str, url: str = "http://127.0.0.1:8000") -> str:
    data = base64.b64encode(Path(picture).read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": question},
    ]
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=64,
        )
    return reply.choices[0].message.content


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python examples/openai_package.py PICTURE QUESTION [URL]")
    sys.stdout.write(main(*sys.argv[1:]) + "\n")
