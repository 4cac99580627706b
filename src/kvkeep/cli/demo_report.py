"""How ``kvkeep demo`` shows its result: a table of 80 columns, the answers, and a summary."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvkeep.demo.outcome import Comparison, DemoResult, Reply
from kvkeep.demo.prompts import first_line

#: Columns of the screen that the report takes, at most.
WIDTH = 80


def print_report(result: DemoResult, console: Console, program: str) -> None:
    """Show what a run of the demo found, and what to do next.

    Args:
        result: of the run.
        console: to print to.
        program: how this command was called, to be called again.
    """
    console.print()
    console.print(_table(result), width=WIDTH)
    console.print()
    for number, item in enumerate(result.comparisons, 1):
        console.print(Text(f"{number} {item.question}", style="bold"))
        console.print(Padding(Text(first_line(item.answer)), (0, 0, 0, 2)), width=WIDTH)
    console.print()
    console.print(_summary(result), width=WIDTH)
    console.print()
    console.print(
        Text.assemble(
            ("Next: ", "dim"),
            (f"{program} doctor", "cyan"),
            (" says what this machine can do, README.md how to use it.", "dim"),
        ),
        width=WIDTH,
    )


def _table(result: DemoResult) -> Table:
    """The warm replies, then those after the restart, each beside the cold one."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        title=Text(f"One document, {_count(result)}, {result.engine}\n"),
        title_style="bold",
        padding=0,
        width=WIDTH,
    )
    table.add_column("\n\nquestion", ratio=1, no_wrap=True, overflow="ellipsis")
    for name in (
        "\nprompt\ntokens",
        "\n\nfound",
        "first\ntoken\ncold",
        "first\ntoken\nkept",
    ):
        table.add_column(name, justify="right", min_width=len("4.00 s"), no_wrap=True)
    table.add_column("\nspeed\nup", justify="right", style="bold", no_wrap=True)
    table.add_column("\n\nsame", justify="right", no_wrap=True)
    table.add_row(Text("in the same process, from memory", style="italic cyan"))
    for number, item in enumerate(result.comparisons, 1):
        _add_row(table, number, item, item.warm)
    table.add_row()
    table.add_row(Text("after a restart, from disk", style="italic cyan"))
    for number, item in enumerate(result.comparisons, 1):
        _add_row(table, number, item, item.restarted)
    return table


def _add_row(table: Table, number: int, item: Comparison, reply: Reply) -> None:
    table.add_row(
        Text(f"{number} {item.question}"),
        f"{item.num_prompt_tokens:,}",
        f"{reply.num_found:,}",
        _seconds(item.cold.first_token_s),
        _seconds(reply.first_token_s),
        f"{item.speed_up(reply):.1f}x",
        Text("yes", style="green") if item.is_same(reply) else Text("NO", style="bold red"),
    )


def _summary(result: DemoResult) -> Text:
    """Totals, and what the comparison of tokens means."""
    warm, restarted = result.cold_s / result.warm_s, result.cold_s / result.restarted_s
    text = Text(
        f"Waiting for first tokens took {_seconds(result.cold_s)} cold, "
        f"{_seconds(result.warm_s)} from memory ({warm:.1f} times as fast) and "
        f"{_seconds(result.restarted_s)} from disk ({restarted:.1f} times)."
    )
    if result.store_s is not None:
        text.append(f" Storing the document took {_seconds(result.store_s)}, once.")
    text.append(
        f"\nStarting again took {_seconds(result.start_s)}: a new process that loads the model and "
        "opens the cache. It is in none of the times above.\n"
    )
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
