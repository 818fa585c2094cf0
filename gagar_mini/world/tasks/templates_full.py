"""The richer templates of the `full` level: docstrings, helpers, dicts, parsing.

The first line of a docstring also tells the statement what a function is for. Sources
hold no f-strings: their syntax trees differ between Python versions.
"""

import random

from gagar_mini.world.tasks.templates import Template
from gagar_mini.world.tasks.templates_core import letters, number_list

NAMES = ("ann", "bob", "cy", "dee")


# --- inputs ---------------------------------------------------------------------------


def _pairs(rng: random.Random) -> tuple:
    parts = []
    for _ in range(rng.randint(0, 4)):
        key, value = rng.choice("abc"), str(rng.randint(-3, 9))
        parts.append(rng.choice([f"{key}={value}", f" {key} = {value} ", "", key]))
    return (";".join(parts),)


def _ranges(rng: random.Random) -> tuple:
    parts = []
    for _ in range(rng.randint(0, 3)):
        low = rng.randint(0, 9)
        parts.append(rng.choice([str(low), f"{low}-{low + rng.randint(0, 3)}"]))
    return (",".join(parts),)


def _csv(rng: random.Random) -> tuple:
    cells = [letters(rng, "ab,", 0, 3) for _ in range(rng.randint(1, 3))]
    quoted = [f'"{c}"' if "," in c or rng.random() < 0.3 else c for c in cells]
    return (",".join(quoted),)


def _versions(rng: random.Random) -> tuple:
    left = [rng.randint(0, 11) for _ in range(rng.randint(1, 3))]
    right = rng.choice([left, [*left, rng.randint(0, 1)], left[:-1]])
    right = list(right) or [0]
    if rng.random() < 0.5:
        right[rng.randrange(len(right))] = rng.randint(0, 11)
    pair = [".".join(map(str, left)), ".".join(map(str, right))]
    rng.shuffle(pair)
    return tuple(pair)


def _duration(rng: random.Random) -> tuple:
    hours, minutes = rng.randint(0, 12), rng.randint(0, 90)
    forms = [f"{hours}h{minutes}m", f"{hours}h", f"{minutes}m", f"{minutes}", ""]
    return (rng.choice(forms),)


def _expression(rng: random.Random) -> tuple:
    text = letters(rng, "0123456789+-*() ", 0, 9)
    return (text,)


def _postfix(rng: random.Random) -> tuple:
    tokens, depth = [], 0
    for _ in range(rng.randint(1, 4)):
        tokens.append(str(rng.randint(0, 9)))
        depth += 1
        while depth > 1 and rng.random() < 0.6:
            tokens.append(rng.choice("+-*"))
            depth -= 1
    tokens += [rng.choice("+-*") for _ in range(depth - 1)]
    return (" ".join(tokens),)


def _brackets(rng: random.Random) -> tuple:
    text = ""
    for _ in range(rng.randint(0, 3)):
        pair = rng.choice(["()", "[]"])
        text = rng.choice([pair[0] + text + pair[1], text + pair, text + "x"])
    if rng.random() < 0.5:
        text += rng.choice("()[]")
    elif rng.random() < 0.4:
        text = text[::-1]
    return (text,)


def _sales(rng: random.Random) -> tuple:
    size = rng.randint(0, 6)
    return ([[rng.choice(NAMES), rng.randint(-4, 9)] for _ in range(size)],)


def counts(rng: random.Random, max_size: int = 4) -> dict[str, int]:
    """A small dict of names and counts; ties and empty dicts are frequent."""
    names = rng.sample(NAMES, rng.randint(0, max_size))
    return {name: rng.randint(0, 4) for name in names}


def _top_names(rng: random.Random) -> tuple:
    return counts(rng), rng.randint(0, 3)


def _two_counts(rng: random.Random) -> tuple:
    return counts(rng), counts(rng)


def _one_count(rng: random.Random) -> tuple:
    return (counts(rng),)


def _rows(rng: random.Random) -> tuple:
    rows = []
    for _ in range(rng.randint(0, 5)):
        row = {"name": rng.choice(NAMES)}
        if rng.random() < 0.8:
            row["age"] = rng.randint(0, 5)
        rows.append(row)
    return rows, rng.randint(0, 5)


def _join(rng: random.Random) -> tuple:
    people = [[rng.randint(0, 3), rng.choice(NAMES)] for _ in range(rng.randint(0, 4))]
    orders = [[rng.randint(0, 3), rng.randint(1, 9)] for _ in range(rng.randint(0, 4))]
    return people, orders


def _ragged(rng: random.Random) -> tuple:
    rows = [number_list(rng, 0, 9, 0, 3) for _ in range(rng.randint(0, 4))]
    return rows, rng.randint(0, 2), rng.choice([-1, 0])


def _rank(rng: random.Random) -> tuple:
    scores = {name: rng.randint(0, 3) for name in NAMES[: rng.randint(1, 4)]}
    return scores, rng.choice([*scores, "eve"])


def _clock_text(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.choice([0, 5, 30, rng.randint(0, 59)]):02}"


def _clock(rng: random.Random) -> tuple:
    return (_clock_text(rng),)


def _clock_and_minutes(rng: random.Random) -> tuple:
    return _clock_text(rng), rng.choice([rng.randint(-90, 90), rng.randint(0, 1600)])


def _slots(rng: random.Random, low: int = 0, high: int = 12) -> list[list[int]]:
    slots = []
    for _ in range(rng.randint(0, 4)):
        start = rng.randint(low, high)
        slots.append([start, start + rng.randint(1, 4)])
    return slots


def _some_slots(rng: random.Random) -> tuple:
    return (_slots(rng),)


def _gaps(rng: random.Random) -> tuple:
    slots, end = [], 0
    for _ in range(rng.randint(0, 3)):
        start = end + rng.randint(0, 3)
        end = start + rng.randint(1, 3)
        slots.append([start, end])
    return slots, end + rng.randint(0, 3)


def _month(rng: random.Random) -> tuple:
    year = rng.choice([1900, 2000, 2023, 2024, rng.randint(1896, 2104)])
    return rng.choice([2, 2, rng.randint(1, 12)]), year


def _busy(rng: random.Random) -> tuple:
    return _slots(rng), rng.randint(0, 14)


def _sentence(rng: random.Random, max_words: int = 6) -> str:
    words = ["the", "of", "a", "fox", "Red", "and", "barn", "it"]
    size = rng.randint(0, max_words)
    return " ".join(rng.choice(words) for _ in range(size))


def _wrap(rng: random.Random) -> tuple:
    return _sentence(rng), rng.randint(4, 12)


def _title(rng: random.Random) -> tuple:
    return (_sentence(rng),)


def _camel(rng: random.Random) -> tuple:
    parts = [rng.choice(["get", "Item", "ID", "x", "Max"]) for _ in range(4)]
    return ("".join(parts[: rng.randint(0, 4)]),)


def _plural(rng: random.Random) -> tuple:
    words = ["cat", "bus", "city", "day", "box", "fly", "s", "y"]
    return rng.choice([0, 1, 2, rng.randint(0, 9)]), rng.choice(words)


def _names(rng: random.Random) -> tuple:
    return ([rng.choice(NAMES) for _ in range(rng.randint(0, 4))],)


def _cells(rng: random.Random) -> tuple:
    size = rng.randint(0, 3)
    cells = [letters(rng, "abc", 0, 4) for _ in range(size)]
    return cells, [rng.randint(2, 5) for _ in range(size)]


def _runs(rng: random.Random) -> tuple:
    parts = [rng.choice("ab") * rng.choice([1, 1, 2, 3]) for _ in range(4)]
    return ("".join(parts[: rng.randint(0, 4)]),)


def _encoded(rng: random.Random) -> tuple:
    size = rng.randint(0, 3)
    parts = [rng.choice(["", "2", "3", "12"]) + rng.choice("ab") for _ in range(size)]
    return ("".join(parts),)


def _bill(rng: random.Random) -> tuple:
    return rng.randint(0, 40), rng.randint(1, 6)


def _small_number(rng: random.Random) -> tuple:
    return (rng.choice([rng.randint(1, 20), rng.randint(1, 120)]),)


def _roman(rng: random.Random) -> tuple:
    parts = [
        "X" * rng.randint(0, 3),
        rng.choice(["", "IV", "IX", "V", "VI", "I", "II"]),
    ]
    return (rng.choice(["", "XL", "L", "XC", "C"]) + "".join(parts),)


def _base(rng: random.Random) -> tuple:
    return rng.choice([0, rng.randint(0, 9), rng.randint(0, 300)]), rng.randint(2, 9)


def _change(rng: random.Random) -> tuple:
    return rng.randint(0, 30), rng.choice([[1, 2, 5], [1, 5, 10], [1, 10], [1, 3, 4]])


def _income(rng: random.Random) -> tuple:
    brackets = rng.choice([[[0, 10], [50, 20]], [[0, 0], [20, 10], [60, 50]]])
    return rng.randint(0, 100), brackets


def _quantity(rng: random.Random) -> tuple:
    return rng.choice([rng.randint(0, 12), 5, 10]), rng.randint(1, 9)


def _days(rng: random.Random) -> tuple:
    return (rng.choice([rng.randint(0, 40), 7 * rng.randint(0, 4)]),)


def grid(rng: random.Random, low: int, high: int, max_side: int = 3) -> list[list[int]]:
    """A rectangular grid of at least one row and one column."""
    height, width = rng.randint(1, max_side), rng.randint(1, max_side)
    return [[rng.randint(low, high) for _ in range(width)] for _ in range(height)]


def _grid(rng: random.Random) -> tuple:
    return (grid(rng, 0, 9),)


def _cell(rng: random.Random) -> tuple:
    cells = grid(rng, 0, 1)
    return cells, rng.randrange(len(cells)), rng.randrange(len(cells[0]))


def _square(rng: random.Random) -> tuple:
    side = rng.randint(1, 3)
    return ([[rng.randint(-2, 9) for _ in range(side)] for _ in range(side)],)


def _island(rng: random.Random) -> tuple:
    cells = grid(rng, 0, 1, 4)
    return cells, rng.randrange(len(cells)), rng.randrange(len(cells[0]))


def _board(rng: random.Random) -> tuple:
    board = ["".join(rng.choice("xo.") for _ in range(3)) for _ in range(3)]
    if rng.random() < 0.6:
        mark, k = rng.choice("xo"), rng.randrange(3)
        kind = rng.choice(["row", "column", "falling", "rising"])
        for i in range(3):
            row, col = {
                "row": (k, i),
                "column": (i, k),
                "falling": (i, i),
                "rising": (i, 2 - i),
            }[kind]
            board[row] = board[row][:col] + mark + board[row][col + 1 :]
    return (board,)


def _walk(rng: random.Random) -> tuple:
    return letters(rng, "udlr", 0, 6), rng.randint(1, 3)


# --- templates ------------------------------------------------------------------------

PARSING = (
    Template(
        "parse_pairs",
        "parsing",
        '''\
def parse_pairs(text):
    """Return the "key=number" parts of text, split at ";", as a dict of ints."""
    pairs = {}
    for part in text.split(";"):
        if "=" not in part:
            continue
        key, value = part.split("=")
        pairs[key.strip()] = int(value)
    return pairs
''',
        _pairs,
        ({"parse_pairs": "read_settings", "pairs": "settings"},),
    ),
    Template(
        "parse_ranges",
        "parsing",
        '''\
def parse_ranges(text):
    """Return the sorted distinct numbers of text such as "1-3,7"; bounds count."""
    numbers = set()
    for part in text.split(","):
        if "-" in part:
            low, high = part.split("-")
            numbers.update(range(int(low), int(high) + 1))
        elif part:
            numbers.add(int(part))
    return sorted(numbers)
''',
        _ranges,
        ({"parse_ranges": "read_pages"},),
    ),
    Template(
        "split_csv",
        "parsing",
        '''\
def split_csv(line):
    """Return the cells of a line; commas inside double quotes do not separate."""
    cells = [""]
    is_quoted = False
    for char in line:
        if char == '"':
            is_quoted = not is_quoted
        elif char == "," and not is_quoted:
            cells.append("")
        else:
            cells[-1] += char
    return cells
''',
        _csv,
        ({"split_csv": "read_cells", "char": "c"},),
    ),
    Template(
        "compare_versions",
        "parsing",
        '''\
def version_parts(text, size):
    parts = [int(part) for part in text.split(".")]
    return parts + [0] * (size - len(parts))


def compare_versions(left, right):
    """Return -1, 0 or 1 as version left is older, the same or newer than right."""
    size = max(left.count("."), right.count(".")) + 1
    a = version_parts(left, size)
    b = version_parts(right, size)
    if a == b:
        return 0
    return -1 if a < b else 1
''',
        _versions,
        ({"compare_versions": "order_versions"},),
    ),
    Template(
        "parse_duration",
        "parsing",
        '''\
def parse_duration(text):
    """Return the minutes of text such as "1h30m"; a bare number means minutes."""
    minutes = 0
    digits = ""
    for char in text:
        if char.isdigit():
            digits += char
        elif char == "h":
            minutes += 60 * int(digits)
            digits = ""
    if digits:
        minutes += int(digits)
    return minutes
''',
        _duration,
        ({"parse_duration": "read_minutes", "char": "c"},),
        is_held_out=True,
    ),
    Template(
        "tokens",
        "parsing",
        '''\
def tokens(text):
    """Return the numbers (joined digits) and the signs of text in order, no blanks."""
    found = []
    number = ""
    for char in text + " ":
        if char.isdigit():
            number += char
            continue
        if number:
            found.append(number)
            number = ""
        if char != " ":
            found.append(char)
    return found
''',
        _expression,
        ({"tokens": "lex", "found": "result"},),
    ),
    Template(
        "postfix",
        "parsing",
        '''\
def postfix(text):
    """Return the value of a postfix expression such as "2 3 + 4 *"."""
    stack = []
    for token in text.split():
        if token.isdigit():
            stack.append(int(token))
            continue
        right = stack.pop()
        left = stack.pop()
        if token == "+":
            stack.append(left + right)
        elif token == "-":
            stack.append(left - right)
        else:
            stack.append(left * right)
    return stack[-1]
''',
        _postfix,
        ({"postfix": "evaluate", "stack": "values"},),
        is_held_out=True,
    ),
    Template(
        "balanced",
        "parsing",
        '''\
class BracketStack:
    def __init__(self):
        self.open = []

    def feed(self, char):
        if char in "([":
            self.open.append(char)
            return True
        wanted = {")": "(", "]": "["}[char]
        return bool(self.open) and self.open.pop() == wanted


def balanced(text):
    """Return whether the round and square brackets of text are well nested."""
    stack = BracketStack()
    for char in text:
        if char in "()[]" and not stack.feed(char):
            return False
    return not stack.open
''',
        _brackets,
        ({"balanced": "is_nested"},),
    ),
)

TABLES = (
    Template(
        "totals_by_name",
        "tables",
        '''\
def totals_by_name(sales):
    """Return a dict of the summed amounts per name of [name, amount] rows."""
    totals = {}
    for name, amount in sales:
        totals[name] = totals.get(name, 0) + amount
    return totals
''',
        _sales,
        ({"totals_by_name": "sum_sales", "totals": "sums"},),
    ),
    Template(
        "best_names",
        "tables",
        '''\
def best_names(points, size):
    """Return the size names with most points; equal points go by the alphabet."""
    pairs = [(-score, name) for name, score in points.items()]
    pairs.sort()
    return [name for _, name in pairs[:size]]
''',
        _top_names,
        ({"best_names": "leaders"},),
    ),
    Template(
        "add_counts",
        "tables",
        '''\
def add_counts(left, right):
    """Return the counts of both dicts added, without names that come to zero."""
    result = dict(left)
    for name, count in right.items():
        result[name] = result.get(name, 0) + count
    return {name: count for name, count in result.items() if count != 0}
''',
        _two_counts,
        ({"add_counts": "merge_stock"},),
    ),
    Template(
        "by_count",
        "tables",
        '''\
def by_count(numbers):
    """Return a dict from each value of numbers to the sorted list of its names."""
    groups = {}
    for name, value in numbers.items():
        if value not in groups:
            groups[value] = []
        groups[value].append(name)
    return {str(value): sorted(names) for value, names in groups.items()}
''',
        _one_count,
        ({"by_count": "invert"},),
        is_held_out=True,
    ),
    Template(
        "old_enough",
        "tables",
        '''\
def old_enough(rows, limit):
    """Return the distinct names of rows whose age is known and at least limit."""
    names = []
    for row in rows:
        age = row.get("age", -1)
        if age < 0 or age < limit:
            continue
        if row["name"] not in names:
            names.append(row["name"])
    return names
''',
        _rows,
        ({"old_enough": "adults"},),
    ),
    Template(
        "join_orders",
        "tables",
        '''\
def orders_of(key, orders):
    return [amount for owner, amount in orders if owner == key]


def join_orders(people, orders):
    """Return [name, total of orders] for each person [id, name] that has orders."""
    joined = []
    for key, name in people:
        amounts = orders_of(key, orders)
        if amounts:
            joined.append([name, sum(amounts)])
    return joined
''',
        _join,
        ({"join_orders": "spending"},),
    ),
    Template(
        "column",
        "tables",
        '''\
def column(rows, index, default):
    """Return the cells at index of all rows, default where a row is too short."""
    cells = []
    for row in rows:
        if index < len(row):
            cells.append(row[index])
        else:
            cells.append(default)
    return cells
''',
        _ragged,
        ({"column": "pick_cells"},),
    ),
    Template(
        "rank_of",
        "tables",
        '''\
def rank_of(scores, name):
    """Return 1 plus the number of better scores than that of name, 0 if unknown."""
    if name not in scores:
        return 0
    own = scores[name]
    better = [score for score in scores.values() if score > own]
    return len(better) + 1
''',
        _rank,
        ({"rank_of": "place", "own": "mine"},),
        is_held_out=True,
    ),
)

TIMES = (
    Template(
        "to_minutes",
        "times",
        '''\
def to_minutes(clock):
    """Return the minutes since midnight of a clock such as "09:30"."""
    parts = clock.split(":")
    hours = int(parts[0])
    minutes = int(parts[1])
    return hours * 60 + minutes
''',
        _clock,
        ({"to_minutes": "minutes_of"},),
    ),
    Template(
        "add_minutes",
        "times",
        '''\
DAY = 24 * 60


def show_clock(minutes):
    return str(minutes // 60).zfill(2) + ":" + str(minutes % 60).zfill(2)


def add_minutes(clock, minutes):
    """Return the clock time so many minutes later (or earlier), across midnight."""
    hour, minute = clock.split(":")
    total = int(hour) * 60 + int(minute) + minutes
    return show_clock(total % DAY)
''',
        _clock_and_minutes,
        ({"add_minutes": "shift_clock"},),
    ),
    Template(
        "merge_slots",
        "times",
        '''\
def merge_slots(slots):
    """Return [start, end] slots sorted, those that overlap or touch made one."""
    merged = []
    for start, end in sorted(slots):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
''',
        _some_slots,
        ({"merge_slots": "union"},),
    ),
    Template(
        "free_gaps",
        "times",
        '''\
def free_gaps(slots, end):
    """Return the [start, end] gaps between 0 and end that sorted slots leave free."""
    gaps = []
    free_from = 0
    for first, last in slots:
        if first > free_from:
            gaps.append([free_from, first])
        free_from = last
    if free_from < end:
        gaps.append([free_from, end])
    return gaps
''',
        _gaps,
        ({"free_gaps": "idle_times"},),
        is_held_out=True,
    ),
    Template(
        "month_days",
        "times",
        '''\
def has_leap_day(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def month_days(month, year):
    """Return the number of days of a month (1 to 12) in that year."""
    if month == 2:
        return 29 if has_leap_day(year) else 28
    if month in (4, 6, 9, 11):
        return 30
    return 31
''',
        _month,
        ({"month_days": "days_in"},),
    ),
    Template(
        "max_busy",
        "times",
        '''\
def max_busy(slots):
    """Return the largest number of [start, end) slots that run at the same time."""
    most = 0
    for moment, _ in slots:
        running = 0
        for start, end in slots:
            if start <= moment < end:
                running += 1
        most = max(most, running)
    return most
''',
        _some_slots,
        ({"max_busy": "peak_load"},),
    ),
    Template(
        "next_free",
        "times",
        '''\
def next_free(slots, moment):
    """Return the first time from moment on outside all [start, end) slots."""
    for start, end in sorted(slots):
        if start <= moment < end:
            moment = end
    return moment
''',
        _busy,
        ({"next_free": "earliest"},),
    ),
)

LAYOUT = (
    Template(
        "wrap_words",
        "layout",
        '''\
def wrap_words(text, width):
    """Return lines of whole words, each as long as fits in width characters."""
    lines = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = (line + " " + word).strip()
    if line:
        lines.append(line)
    return lines
''',
        _wrap,
        ({"wrap_words": "fold"},),
    ),
    Template(
        "headline",
        "layout",
        '''\
SMALL_WORDS = ("a", "and", "of", "the")


def headline(text):
    """Return text with capital words; small words stay small unless first."""
    words = []
    for position, word in enumerate(text.lower().split()):
        if position > 0 and word in SMALL_WORDS:
            words.append(word)
        else:
            words.append(word.capitalize())
    return " ".join(words)
''',
        _title,
        ({"headline": "as_title"},),
    ),
    Template(
        "snake_case",
        "layout",
        '''\
def snake_case(name):
    """Return a camelCase name in lower case, with "_" before each later capital."""
    result = ""
    for position, char in enumerate(name):
        if char.isupper() and position > 0:
            result += "_"
        result += char.lower()
    return result
''',
        _camel,
        ({"snake_case": "underscored", "char": "c"},),
    ),
    Template(
        "counted",
        "layout",
        '''\
def counted(number, noun):
    """Return number and noun, in the plural (s, es or ies) unless number is 1."""
    if number == 1:
        return "1 " + noun
    if noun.endswith(("s", "x")):
        noun += "es"
    elif noun.endswith("y") and noun[-2:-1] not in "aeiou":
        noun = noun[:-1] + "ies"
    else:
        noun += "s"
    return str(number) + " " + noun
''',
        _plural,
        ({"counted": "quantity_text"},),
    ),
    Template(
        "listing",
        "layout",
        '''\
def listing(names):
    """Return names as in "a, b and c", and "nobody" for an empty list."""
    if not names:
        return "nobody"
    if len(names) == 1:
        return names[0]
    start = ", ".join(names[:-1])
    return start + " and " + names[-1]
''',
        _names,
        ({"listing": "name_list"},),
    ),
    Template(
        "table_row",
        "layout",
        '''\
def fit(cell, width):
    if len(cell) > width:
        return cell[: width - 1] + "~"
    return cell + " " * (width - len(cell))


def table_row(cells, widths):
    """Return cells cut or padded to their widths, between bars."""
    parts = [fit(cell, width) for cell, width in zip(cells, widths)]
    return "|" + "|".join(parts) + "|"
''',
        _cells,
        ({"table_row": "render_row"},),
    ),
    Template(
        "run_lengths",
        "layout",
        '''\
def run_lengths(text):
    """Return text with each run of a letter as the letter and its length ("a3b1")."""
    result = ""
    start = 0
    for end in range(1, len(text) + 1):
        if end == len(text) or text[end] != text[start]:
            result += text[start] + str(end - start)
            start = end
    return result
''',
        _runs,
        ({"run_lengths": "squeeze"},),
    ),
    Template(
        "expand_runs",
        "layout",
        '''\
def expand_runs(text):
    """Return text with each count written out, so that "3ab" is "aaab"."""
    result = ""
    count = 0
    for char in text:
        if char.isdigit():
            count = 10 * count + int(char)
        else:
            result += char * max(count, 1)
            count = 0
    return result
''',
        _encoded,
        ({"expand_runs": "unpack", "char": "c"},),
    ),
)

AMOUNTS = (
    Template(
        "split_bill",
        "amounts",
        '''\
def split_bill(total, people):
    """Return shares of a total that differ by 1 at most, the larger ones first."""
    share = total // people
    rest = total % people
    shares = []
    for position in range(people):
        extra = 1 if position < rest else 0
        shares.append(share + extra)
    return shares
''',
        _bill,
        ({"split_bill": "shares_of"},),
    ),
    Template(
        "to_roman",
        "amounts",
        '''\
ROMAN = [(100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X")]
ROMAN += [(9, "IX"), (5, "V"), (4, "IV"), (1, "I")]


def to_roman(number):
    """Return a number from 1 to 399 in Roman numerals."""
    result = ""
    for value, letter in ROMAN:
        while number >= value:
            result += letter
            number -= value
    return result
''',
        _small_number,
        ({"to_roman": "roman"},),
    ),
    Template(
        "from_roman",
        "amounts",
        '''\
VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}


def from_roman(text):
    """Return a Roman numeral's value; a smaller letter before a larger counts down."""
    total = 0
    previous = 0
    for letter in reversed(text):
        value = VALUES[letter]
        if value < previous:
            total -= value
        else:
            total += value
        previous = value
    return total
''',
        _roman,
        ({"from_roman": "roman_value"},),
    ),
    Template(
        "to_base",
        "amounts",
        '''\
def to_base(number, base):
    """Return the digits of number (0 or more) in a base from 2 to 9, as text."""
    if number == 0:
        return "0"
    digits = ""
    while number > 0:
        digits = str(number % base) + digits
        number = number // base
    return digits
''',
        _base,
        ({"to_base": "in_base"},),
    ),
    Template(
        "coins_for",
        "amounts",
        '''\
def coins_for(amount, coins):
    """Return [coin, count] of the coins used, always taking the largest that fits."""
    used = []
    for coin in sorted(coins, reverse=True):
        count = amount // coin
        if count > 0:
            used.append([coin, count])
            amount -= count * coin
    return used
''',
        _change,
        ({"coins_for": "give_change"},),
    ),
    Template(
        "tax",
        "amounts",
        '''\
def tax(income, brackets):
    """Return the tax, rounded down, by sorted [from, percent] income brackets."""
    total = 0
    for position, (start, percent) in enumerate(brackets):
        stop = income
        if position + 1 < len(brackets):
            stop = min(income, brackets[position + 1][0])
        if stop > start:
            total += (stop - start) * percent
    return total // 100
''',
        _income,
        ({"tax": "levy"},),
        is_held_out=True,
    ),
    Template(
        "order_price",
        "amounts",
        '''\
def discount_for(pieces):
    if pieces >= 10:
        return 20
    return 10 if pieces >= 5 else 0


def order_price(pieces, price):
    """Return the price less 10 percent from 5 and 20 percent from 10 pieces."""
    full = pieces * price
    off = full * discount_for(pieces) // 100
    return full - off
''',
        _quantity,
        ({"order_price": "cost_of"},),
    ),
    Template(
        "late_fee",
        "amounts",
        '''\
def late_fee(days):
    """Return the fee: 2 a day for the first week, 5 a day after it, at most 60."""
    if days <= 7:
        return 2 * days
    fee = 2 * 7 + 5 * (days - 7)
    return min(fee, 60)
''',
        _days,
        ({"late_fee": "overdue"},),
        is_held_out=True,
    ),
)

GRIDS = (
    Template(
        "transpose",
        "grids",
        '''\
def transpose(grid):
    """Return the grid with rows and columns exchanged."""
    result = []
    for column in range(len(grid[0])):
        line = [row[column] for row in grid]
        result.append(line)
    return result
''',
        _grid,
        ({"transpose": "flip", "grid": "cells"},),
    ),
    Template(
        "turn_right",
        "grids",
        '''\
def turn_right(grid):
    """Return the grid turned clockwise by a quarter."""
    height = len(grid)
    result = []
    for column in range(len(grid[0])):
        line = [grid[height - 1 - row][column] for row in range(height)]
        result.append(line)
    return result
''',
        _grid,
        ({"turn_right": "quarter_turn", "grid": "cells"},),
    ),
    Template(
        "neighbours",
        "grids",
        '''\
def inside(grid, row, column):
    return 0 <= row < len(grid) and 0 <= column < len(grid[0])


def neighbours(grid, row, column):
    """Return the sum of the up to eight cells around a cell, without the cell."""
    total = 0
    for r in range(row - 1, row + 2):
        for c in range(column - 1, column + 2):
            if inside(grid, r, c) and (r, c) != (row, column):
                total += grid[r][c]
    return total
''',
        _cell,
        ({"neighbours": "around", "grid": "cells"},),
    ),
    Template(
        "diagonals",
        "grids",
        '''\
def diagonals(square):
    """Return [sum of the falling diagonal, sum of the rising one] of a square."""
    falling = 0
    rising = 0
    size = len(square)
    for i in range(size):
        falling += square[i][i]
        rising += square[i][size - 1 - i]
    return [falling, rising]
''',
        _square,
        ({"diagonals": "cross_sums"},),
    ),
    Template(
        "island_size",
        "grids",
        '''\
def island_size(grid, row, column):
    """Return the number of 1 cells joined to a cell by sides, 0 if it is not 1."""
    todo = [(row, column)]
    seen = set()
    while todo:
        r, c = todo.pop()
        if r < 0 or c < 0 or r >= len(grid) or c >= len(grid[0]):
            continue
        if grid[r][c] != 1 or (r, c) in seen:
            continue
        seen.add((r, c))
        todo += [(r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)]
    return len(seen)
''',
        _island,
        ({"island_size": "patch_size", "grid": "cells"},),
    ),
    Template(
        "winner",
        "grids",
        '''\
def board_lines(board):
    lines = list(board)
    lines += ["".join(row[i] for row in board) for i in range(3)]
    lines.append("".join(board[i][i] for i in range(3)))
    lines.append("".join(board[i][2 - i] for i in range(3)))
    return lines


def winner(board):
    """Return the mark ("x" or "o") that fills a line of three, "" if none; x first."""
    for mark in "xo":
        if mark * 3 in board_lines(board):
            return mark
    return ""
''',
        _board,
        ({"winner": "who_won"},),
    ),
    Template(
        "walk",
        "grids",
        '''\
def walk(moves, limit):
    """Return [x, y] after moves (u, d, l, r) from [0, 0], kept within 0 to limit."""
    x, y = 0, 0
    for move in moves:
        if move == "u":
            y = min(y + 1, limit)
        elif move == "d":
            y = max(y - 1, 0)
        elif move == "r":
            x = min(x + 1, limit)
        else:
            x = max(x - 1, 0)
    return [x, y]
''',
        _walk,
        ({"walk": "follow"},),
    ),
)

FULL_TEMPLATES: tuple[Template, ...] = (
    *PARSING,
    *TABLES,
    *TIMES,
    *LAYOUT,
    *AMOUNTS,
    *GRIDS,
)
