"""How ``kvkeep demo`` shows its result: a table of 80 columns, the answers, and a summary."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvkeep.demo.outcome import DemoResult
from kvkeep.demo.prompts import first_line

#: Columns of the screen that the report takes, at most.
WIDTH = 80


def print_report(result: DemoResult, console: Console) -> None:
    """Show what a run of the demo found."""
    console.print()
    console.print(_table(result), width=WIDTH)
    for number, item in enumerate(result.comparisons, 1):
        console.print(Text(f"{number} {item.question}", style="bold"))
        console.print(Padding(Text(first_line(item.answer)), (0, 0, 0, 2)), width=WIDTH)
    console.print()
    console.print(_summary(result), width=WIDTH)
    console.print()


def _table(result: DemoResult) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text(f"One document, {_count(result)}, {result.engine}"),
        title_style="bold",
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
        width=WIDTH,
    )
    table.add_column("\n\nquestion", ratio=1, no_wrap=True, overflow="ellipsis")
    for name in (
        "\nprompt\ntokens",
        "\ntokens\nfound",
        "first\ntoken\ncold",
        "first\ntoken\nwarm",
    ):
        table.add_column(name, justify="right", min_width=6, no_wrap=True)
    table.add_column("\nspeed-\nup", justify="right", style="bold", min_width=6, no_wrap=True)
    table.add_column("\nsame\ntokens", justify="center", min_width=6, no_wrap=True)
    for number, item in enumerate(result.comparisons, 1):
        table.add_row(
            Text(f"{number} {item.question}"),
            f"{item.num_prompt_tokens:,}",
            f"{item.warm.num_found:,}",
            _seconds(item.cold.first_token_s),
            _seconds(item.warm.first_token_s),
            f"{item.speed_up:.1f}x",
            Text("yes", style="green") if item.same_tokens else Text("NO", style="bold red"),
        )
    return table


def _summary(result: DemoResult) -> Text:
    """Totals, and what the comparison of tokens means."""
    ratio = result.cold_s / result.warm_s
    text = Text(
        f"Waiting for first tokens took {_seconds(result.cold_s)} cold and "
        f"{_seconds(result.warm_s)} warm: {ratio:.1f} times as fast."
    )
    if result.store_s is not None:
        text.append(f" Storing the document took {_seconds(result.store_s)}, once.")
    text.append("\n")
    if result.same_tokens:
        text.append("Every token is the same with the cache as without it.", style="green")
    else:
        text.append(
            "Some tokens differ with the cache. In float32, as here, they must not.",
            style="bold red",
        )
    text.append(
        " The demo runs in float32 for this comparison: in bfloat16 a prompt that is computed in "
        "two parts rounds differently from one computed in one, cache or no cache.",
        style="dim",
    )
    return text


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def _count(result: DemoResult) -> str:
    number = len(result.comparisons)
    return "1 question" if number == 1 else f"{number} questions"
