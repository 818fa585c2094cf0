"""The 28 short templates of the `core` level: two to five lines each, no comments.

They are short because a tiny policy reads and writes them byte pair by byte pair.
Sources hold no f-strings: their syntax trees differ between Python versions.
"""

import random

from gagar_mini.world.tasks.templates import Draw, Template


def numbers(low: int, high: int, min_size: int = 0, max_size: int = 6) -> Draw:
    """One list of whole numbers, bounds inclusive; short lists are as likely as
    long."""
    return lambda rng: (number_list(rng, low, high, min_size, max_size),)


def number_list(
    rng: random.Random, low: int, high: int, min_size: int = 0, max_size: int = 6
) -> list[int]:
    size = rng.randint(min_size, max_size)
    return [rng.randint(low, high) for _ in range(size)]


def letters(rng: random.Random, alphabet: str, min_size: int, max_size: int) -> str:
    size = rng.randint(min_size, max_size)
    return "".join(rng.choice(alphabet) for _ in range(size))


def _clamp(rng: random.Random) -> tuple:
    low = rng.randint(-5, 5)
    high = low + rng.randint(0, 6)
    return rng.randint(low - 3, high + 3), low, high


def _gcd(rng: random.Random) -> tuple:
    common = rng.randint(1, 6)
    return common * rng.randint(0, 9), common * rng.randint(1, 9)


def _percent(rng: random.Random) -> tuple:
    return rng.randint(0, 12), rng.choice([0, 1, 2, 3, 4, 6, 8])


def _rotate(rng: random.Random) -> tuple:
    return number_list(rng, 0, 9, 0, 5), rng.randint(0, 7)


def _chunks(rng: random.Random) -> tuple:
    return number_list(rng, 0, 9, 0, 7), rng.randint(1, 4)


def _last_index(rng: random.Random) -> tuple:
    return number_list(rng, 0, 3, 0, 6), rng.randint(0, 3)


def _top(rng: random.Random) -> tuple:
    return number_list(rng, 0, 9, 0, 6), rng.randint(0, 4)


def _is_sorted(rng: random.Random) -> tuple:
    items = sorted(number_list(rng, 0, 6, 0, 5))
    if len(items) > 1 and rng.random() < 0.5:
        i = rng.randrange(len(items) - 1)
        items[i], items[i + 1] = items[i + 1], items[i]
    return (items,)


def _above(rng: random.Random) -> tuple:
    return number_list(rng, 0, 5, 0, 6), rng.randint(0, 5)


def _hits(rng: random.Random) -> tuple:
    low = rng.randint(0, 4)
    return number_list(rng, 0, 7, 0, 6), low, low + rng.randint(0, 3)


def _initials(rng: random.Random) -> tuple:
    words = [letters(rng, "abcdEFG", 1, 4) for _ in range(rng.randint(0, 4))]
    return (rng.choice([" ", "  "]).join(words),)


def _shorten(rng: random.Random) -> tuple:
    limit = rng.randint(2, 6)
    return letters(rng, "abcde", 0, limit + 3), limit


def _pad(rng: random.Random) -> tuple:
    return letters(rng, "abcde", 0, 5), rng.randint(0, 7)


def _before(rng: random.Random) -> tuple:
    return letters(rng, "abc-:", 0, 7), rng.choice("-:")


def _drop_prefix(rng: random.Random) -> tuple:
    prefix = letters(rng, "ab", 1, 2)
    rest = letters(rng, "abc", 0, 4)
    return rng.choice([prefix + rest, rest + prefix, rest]), prefix


def _masked(rng: random.Random) -> tuple:
    return letters(rng, "abcde", 1, 7), rng.randint(1, 4)


NUMBERS = (
    Template(
        "clamp",
        "nums",
        """\
def clamp(x, low, high):
    if x < low:
        return low
    return min(x, high)
""",
        _clamp,
        ({"clamp": "limit", "x": "n"},),
        summary="return x, moved to low or high where it lies outside.",
    ),
    Template(
        "gcd",
        "nums",
        """\
def gcd(a, b):
    while b > 0:
        a, b = b, a % b
    return a
""",
        _gcd,
        ({"gcd": "divisor", "a": "m", "b": "n"},),
        summary="return the greatest common divisor of a and b (b above 0).",
    ),
    Template(
        "digit_sum",
        "nums",
        """\
def digit_sum(n):
    if n < 10:
        return n
    return n % 10 + digit_sum(n // 10)
""",
        lambda rng: (rng.choice([rng.randint(0, 12), rng.randint(0, 3000)]),),
        ({"digit_sum": "add_digits"},),
        summary="return the sum of the decimal digits of n.",
    ),
    Template(
        "is_leap",
        "nums",
        """\
def is_leap(year):
    if year % 100 == 0:
        return year % 400 == 0
    return year % 4 == 0
""",
        lambda rng: (
            rng.choice(
                [
                    100 * rng.randint(15, 24),
                    400 * rng.randint(3, 6),
                    rng.randint(1890, 2030),
                    4 * rng.randint(470, 510),
                ]
            ),
        ),
        ({"is_leap": "leap"},),
        summary="return whether year is a leap year (Gregorian).",
    ),
    Template(
        "is_prime",
        "nums",
        """\
def is_prime(n):
    if n < 2:
        return False
    return all(n % d for d in range(2, n))
""",
        lambda rng: (rng.choice([rng.randint(0, 5), rng.randint(0, 40)]),),
        ({"is_prime": "prime"},),
        summary="return whether n is a prime number.",
    ),
    Template(
        "round_up",
        "nums",
        """\
def round_up(n, step):
    return (n + step - 1) // step * step
""",
        lambda rng: (rng.randint(0, 30), rng.randint(1, 7)),
        ({"round_up": "ceil_to"},),
        summary="return the smallest multiple of step that is at least n.",
    ),
    Template(
        "sum_range",
        "nums",
        """\
def sum_range(a, b):
    if a > b:
        a, b = b, a
    return sum(range(a, b + 1))
""",
        lambda rng: (rng.randint(-3, 9), rng.randint(-3, 9)),
        ({"sum_range": "add_range"},),
        summary="return the sum of the whole numbers between a and b, both included.",
    ),
)

LISTS = (
    Template(
        "rotate",
        "lists",
        """\
def rotate(items, k):
    if items:
        k = k % len(items)
    return items[k:] + items[:k]
""",
        _rotate,
        ({"rotate": "shift_left", "items": "xs"},),
        summary="return items moved k places to the left, around the end.",
    ),
    Template(
        "chunks",
        "lists",
        """\
def chunks(items, size):
    starts = range(0, len(items), size)
    return [items[i:i + size] for i in starts]
""",
        _chunks,
        ({"chunks": "split_by", "items": "xs"},),
        summary="return consecutive parts of items, each of length size but the last.",
    ),
    Template(
        "last_index",
        "lists",
        """\
def last_index(items, x):
    for i in range(len(items) - 1, -1, -1):
        if items[i] == x:
            return i
    return -1
""",
        _last_index,
        ({"last_index": "find_last", "items": "xs", "x": "y"},),
        summary="return the last position of x in items, -1 if there is none.",
    ),
    Template(
        "running_sum",
        "lists",
        """\
def running_sum(items):
    ends = range(1, len(items) + 1)
    return [sum(items[:end]) for end in ends]
""",
        numbers(-3, 6, 0, 5),
        ({"running_sum": "totals", "items": "xs"},),
        summary="return the sums of the first 1, 2, 3, ... items.",
    ),
    Template(
        "deltas",
        "lists",
        """\
def deltas(items):
    rest = items[1:]
    return [b - a for a, b in zip(items, rest)]
""",
        numbers(0, 9, 0, 5),
        ({"deltas": "steps", "items": "xs"},),
        summary="return the differences of neighbouring items, later minus earlier.",
    ),
    Template(
        "inner",
        "lists",
        """\
def inner(items):
    if len(items) < 3:
        return []
    return items[1:-1]
""",
        numbers(0, 9, 0, 5),
        ({"inner": "middle", "items": "xs"},),
        summary="return items without the first and the last.",
    ),
    Template(
        "top",
        "lists",
        """\
def top(items, n):
    ranked = sorted(items, reverse=True)
    return ranked[:n]
""",
        _top,
        ({"top": "largest", "items": "xs"},),
        summary="return the n largest items, largest first.",
    ),
    Template(
        "is_sorted",
        "lists",
        """\
def is_sorted(items):
    pairs = zip(items, items[1:])
    return all(a <= b for a, b in pairs)
""",
        _is_sorted,
        ({"is_sorted": "ascending", "items": "xs"},),
        summary="return whether no item is larger than the next.",
    ),
)

STATS = (
    Template(
        "mean",
        "stats",
        """\
def mean(items):
    if not items:
        return 0
    return sum(items) // len(items)
""",
        numbers(0, 9, 0, 5),
        ({"mean": "average", "items": "xs"},),
        summary="return the mean of items rounded down, 0 for none.",
    ),
    Template(
        "median",
        "stats",
        """\
def median(items):
    middle = (len(items) - 1) // 2
    return sorted(items)[middle]
""",
        numbers(0, 9, 1, 6),
        ({"median": "mid_value", "items": "xs"},),
        summary="return the middle one of the sorted items, the lower of two.",
    ),
    Template(
        "spread",
        "stats",
        """\
def spread(items):
    if not items:
        return 0
    return max(items) - min(items)
""",
        numbers(1, 9, 0, 5),
        ({"spread": "width", "items": "xs"},),
        is_held_out=True,
        summary="return the largest minus the smallest item, 0 for none.",
    ),
    Template(
        "above",
        "stats",
        """\
def above(items, limit):
    return sum(x > limit for x in items)
""",
        _above,
        ({"above": "count_over", "items": "xs"},),
        summary="return the number of items larger than limit.",
    ),
    Template(
        "hits",
        "stats",
        """\
def hits(items, low, high):
    inside = [low <= x < high for x in items]
    return sum(inside)
""",
        _hits,
        ({"hits": "count_in", "items": "xs"},),
        is_held_out=True,
        summary="return the number of items from low to below high.",
    ),
    Template(
        "percent",
        "stats",
        """\
def percent(part, whole):
    if whole == 0:
        return 0
    return 100 * part // whole
""",
        _percent,
        ({"percent": "share"},),
        summary="return part in percent of whole rounded down, 0 if whole is 0.",
    ),
)

TEXT = (
    Template(
        "vowels",
        "text",
        """\
def vowels(text):
    lower = text.lower()
    return sum(c in "aeiou" for c in lower)
""",
        lambda rng: (letters(rng, "aeiouAEIOUbcd", 0, 8),),
        ({"vowels": "count_vowels", "text": "s"},),
        summary="return the number of vowels in text, small or capital.",
    ),
    Template(
        "initials",
        "text",
        """\
def initials(text):
    words = text.split()
    return "".join(w[0].upper() for w in words)
""",
        _initials,
        ({"initials": "acronym", "text": "s"},),
        summary="return the first letters of the words of text as capitals.",
    ),
    Template(
        "shorten",
        "text",
        """\
def shorten(text, limit):
    if len(text) <= limit:
        return text
    return text[:limit - 2] + ".."
""",
        _shorten,
        ({"shorten": "cut", "text": "s"},),
        is_held_out=True,
        summary="return text, cut to limit characters with .. at the end if longer.",
    ),
    Template(
        "pad_left",
        "text",
        """\
def pad_left(text, width):
    gap = max(width - len(text), 0)
    return " " * gap + text
""",
        _pad,
        ({"pad_left": "indent", "text": "s"},),
        summary="return text with blanks in front up to width characters.",
    ),
    Template(
        "before",
        "text",
        """\
def before(text, mark):
    i = text.find(mark)
    return text if i < 0 else text[:i]
""",
        _before,
        ({"before": "head", "text": "s"},),
        summary="return the part of text before the first mark, all of it without one.",
    ),
    Template(
        "drop_prefix",
        "text",
        """\
def drop_prefix(text, prefix):
    if text.startswith(prefix):
        return text[len(prefix):]
    return text
""",
        _drop_prefix,
        ({"drop_prefix": "unprefix", "text": "s"},),
        is_held_out=True,
        summary="return text without prefix at its start, if it has it.",
    ),
    Template(
        "masked",
        "text",
        """\
def masked(text, n):
    stars = "*" * (len(text) - n)
    return stars + text[-n:]
""",
        _masked,
        ({"masked": "hide", "text": "s"},),
        summary="return text with stars in place of all but its last n characters.",
    ),
)

CORE_TEMPLATES: tuple[Template, ...] = (*NUMBERS, *LISTS, *STATS, *TEXT)
