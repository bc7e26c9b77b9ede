"""The budgets of an encoder worker."""

from __future__ import annotations

from triptych.base.budgets import SharedBudget

BUDGETS: tuple[SharedBudget, ...] = (
    SharedBudget(
        "jobs",
        "jobs that are open, and streams that wait for one",
        "twice `--plan-credit` before their plan",
        "proxy",
        "429; the proxy asks another encoder, or later",
        made=("jobs/table.py: Overloaded",),
    ),
    SharedBudget(
        "preparations",
        "jobs in preprocessing or queued for it",
        "",
        "proxy",
        "proxies, which divide it among themselves, hold the others back",
        flag="--plan-credit",
    ),
    SharedBudget(
        "decode places",
        "decodes under way: threads for what is cheap, processes for what may take long",
        "as many threads as cores, and twice as many processes of either kind",
        "share",
        "they wait; the tenant whose decodes have taken the least seconds is next",
        flag="--decode-threads",
        made=("media/preparer.py: ThreadPoolExecutor",),
    ),
    SharedBudget(
        "media",
        "bytes of media that have arrived",
        "",
        "share",
        "further media are not read until there is room; a single larger item is allowed",
        flag="--encoder-media-memory",
    ),
    SharedBudget(
        "prepared pixels",
        "bytes of decoded and preprocessed media",
        "",
        "share",
        "the oldest are dropped, and preprocessed again when their turn comes",
        flag="--prepared-memory",
    ),
    SharedBudget(
        "tower",
        "jobs per rank in the tower or queued for it",
        "",
        "proxy",
        "proxies, which divide it among themselves, hold the others back",
        flag="--tower-credit",
    ),
    SharedBudget(
        "rows to fetch",
        "embeddings kept for PD workers that fetch them here",
        "",
        "order",
        "the oldest are left to the store",
        flag="--ec-transfer-memory",
    ),
)
#: Flags with a bound's name that are limits of one item, or say how the tower runs: by field, why.
NO_BUDGETS = {
    "device_memory": "what the tower's memory is taken from",
    "max_image_pixels": "of one item",
    "max_audio_seconds": "of one item",
    "max_video_seconds": "of one item",
    "max_video_pixels": "of one item",
    "max_decode_seconds": "of one item",
    "encoder_graph_max_items": "of one batch",
    "encoder_graph_max_frames": "of one batch",
}
