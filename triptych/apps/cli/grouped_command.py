"""A command with many options, whose help shows the usual ones, and with --help-all all of them in groups."""

from __future__ import annotations

import functools
import re

import click

#: Options that most people need, in the order of their help.
COMMON = (
    *("encoders", "pd_workers", "host", "port", "store", "served_model_name", "device", "quantization"),
    *("max_model_len", "api_key_file"),
)
#: Groups of the others: an option is in the first whose pattern its name fits.
GROUPS: tuple[tuple[str, str], ...] = (
    (
        "Security",
        r".*(cert|key|ca|password|token)(_file)?|tls_name|insecure|auth|allow.*|media_urls|trusted_.*",
    ),
    ("Memory", r".*memory.*|swap.*|.*_ttl|block_size|prefix_caching|media_disk|spool_folder|kv_cache_dtype"),
    ("Workers", r"(min|max)_(encoders|pd_workers)"),
    ("Limits", r"max_.*|limit_.*|key_.*|.*_timeout|media_.*|store_wait|unknown_fields|video_segment_frames"),
    (
        "Workers",
        r"topology|replicas|.*threads|cpu.*|scal.*|encoder_slo|launcher",
    ),
    ("Workers", r"address|cluster(_name)?|proxies|ray_.*|.*_interval|run_dir|drain_.*"),
    ("Network", r".*port|.*host|advertise|ec_transfer|proxy_protocol|otlp_endpoint|engine_url"),
    ("Models", r"model_.*|dtype|demo|engine|chat_template|.*_parser|schemas|.*_parallel|speculative_model"),
    ("Models", r"worker_kind|attention_backend|linear_kernel"),
)
#: The group of what fits none.
EXPERT = "Expert"
TITLES = ("Common", "Models", "Workers", "Memory", "Network", "Security", "Limits", EXPERT)


def group_of(name: str) -> str:
    """The title of an option's group, by the option's name in Python."""
    if name in COMMON:
        return "Common"
    return next((title for title, pattern in GROUPS if re.fullmatch(pattern, name)), EXPERT)


class GroupedCommand(click.Command):
    """A command of a service."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        whole = click.Option(
            ["--help-all"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_show_all,
            help="Show every option, in groups, and exit.",
        )
        return [*super().get_params(ctx), whole]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, tuple[str, str]]]] = {title: [] for title in TITLES}
        for param in self.get_params(ctx):
            named = param.name or ""
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                records["Common" if param.is_eager else group_of(named)].append((named, record))
        records["Common"].sort(key=lambda row: COMMON.index(row[0]) if row[0] in COMMON else len(COMMON))
        for title, rows in records.items():
            if rows and (title == "Common" or ctx.meta.get(__name__)):
                with formatter.section(title):
                    formatter.write_dl([record for _, record in rows])
        if not ctx.meta.get(__name__):
            others = [f"{len(rows)} {title.lower()}" for title, rows in records.items() if rows][1:]
            formatter.write_paragraph()
            formatter.write_text(f"--help-all shows the others, too: {', '.join(others)}.")


def _show_all(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given:
        ctx.meta[__name__] = True
        click.echo(ctx.get_help())
        ctx.exit()


#: `click.command` for a service.
service_command = functools.partial(click.command, cls=GroupedCommand)
