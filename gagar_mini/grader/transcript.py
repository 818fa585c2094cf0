"""A grading as plain JSON that a person can read, without its bulk.

All of it is data: candidates wrote the outputs, a model wrote the calls. Whatever is
not printable ASCII is escaped, and what is long is cut.
"""

import json
from collections.abc import Mapping

from gagar_mini.grader.agentic import Exchange, GradingRecord
from gagar_mini.grader.tools import GraderCall
from gagar_mini.grader.workspace import cut, visible
from gagar_mini.records import Json

MAX_OUTPUT_CHARS = 600
MAX_CALL_CHARS = 400
MAX_SUBMISSION_CHARS = 4_000
MAX_EXCHANGES = 80


def grading_row(record: GradingRecord) -> dict[str, Json]:
    """How the grading ended, what it cost, and what was said.

    `shown` are the ids of the candidates, in the order in which they were listed; they
    begin with the id of their group. `exchanges` beyond `MAX_EXCHANGES` are left out.
    """
    left_out = len(record.exchanges) - MAX_EXCHANGES
    return {
        "task_id": visible(record.task_id),
        "shown": [visible(id_) for id_ in record.shown],
        "reason": visible(record.reason),
        "retried_for": visible(record.retried_for),
        "version": visible(record.version),
        "num_tokens": record.num_tokens,
        "seconds": round(record.seconds, 4),
        "is_cached": record.is_cached,
        "exchanges": [_exchange_row(e) for e in record.exchanges[:MAX_EXCHANGES]],
        "num_left_out": max(0, left_out),
        "submitted": _call_text(record.submitted, MAX_SUBMISSION_CHARS),
    }


def _exchange_row(exchange: Exchange) -> dict[str, Json]:
    said = "output" if exchange.is_data else "told"
    return {
        "call": _call_text(exchange.call, MAX_CALL_CHARS),
        said: cut(visible(exchange.output), MAX_OUTPUT_CHARS),
    }


def _call_text(call: GraderCall | None, max_chars: int) -> str | None:
    """'diff {"id": "c-3fa91c"}'; None where nobody called."""
    if call is None:
        return None
    return cut(visible(f"{call.name} {_arguments_text(call.arguments)}"), max_chars)


def _arguments_text(arguments: Mapping[str, object]) -> str:
    try:
        return json.dumps(dict(arguments))
    except (TypeError, ValueError, RecursionError):  # a mind may write anything
        return "that are no JSON"
