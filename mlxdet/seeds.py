"""Seeds, named streams and indexed draws: every random number of a run is a pure function of (seed, name, counters).

One user seed gives as many independent streams as there are names. A stream's key is a hash of the seed, the name and
the counters, never `seed + step` or `seed * rank`: sums make neighbouring seeds share data (seed 42 at epoch 1 is
seed 43 at epoch 0). Within a stream, Splitmix64 is counter based: draw n is mix(state + (n+1) * gamma), so any draw
is reached in O(1) and a whole batch of draws is one vectorised expression.

Splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the constants of
Vigna's splitmix64.c).
"""

import hashlib
import re
import sys
import threading
from typing import Any

import numpy as np

from mlxdet.errors import UsageError

MASK64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB


def parse_seed(value: Any, flag: str = "--seed") -> int:
    """Return `value` as a seed, an integer in [0, 2**64). 0 is a seed like any other.

    Accepts an int (not a bool) or a string of decimal digits. Raises UsageError for anything else: a seed is never
    clipped, wrapped or replaced.
    """
    digits = isinstance(value, str) and re.fullmatch(r"[0-9]{1,40}", value)
    if digits or (isinstance(value, int | np.integer) and not isinstance(value, bool)):
        number = int(value)
    else:
        raise UsageError(f"{flag}: {value!r} is not a seed; give a whole number from 0 to {MASK64}")
    if not 0 <= number <= MASK64:
        raise UsageError(f"{flag}: {number} is out of range; give a whole number from 0 to {MASK64}")
    return number


def stream(seed: int, name: str, *counters: int) -> int:
    """Return the 64-bit key of the stream `name` at `counters` (each in [0, 2**64)) under `seed`.

    BLAKE2b with an 8-byte digest over seed, length of the name, name and counters, each at a fixed width: two different
    argument lists never give the same message.
    """
    label = name.encode()
    message = [seed.to_bytes(8, "little"), len(label).to_bytes(4, "little"), label]
    message += [int(counter).to_bytes(8, "little") for counter in counters]
    return int.from_bytes(hashlib.blake2b(b"".join(message), digest_size=8).digest(), "little")


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * MIX1) & MASK64
    z = ((z ^ (z >> 27)) * MIX2) & MASK64
    return z ^ (z >> 31)


class Splitmix64:
    """A Splitmix64 generator. Not thread-safe: give each user its own (they cost nothing)."""

    __slots__ = ("state",)

    def __init__(self, state: int):
        self.state = state & MASK64

    def next(self) -> int:
        """Return the next draw, an integer in [0, 2**64)."""
        self.state = (self.state + GAMMA) & MASK64
        return _mix(self.state)

    def at(self, n: int) -> int:
        """Return the draw that the n-th call of next() from here would give (n from 0), without moving."""
        return _mix((self.state + (n + 1) * GAMMA) & MASK64)

    def random_int(self, low: int, high: int) -> int:
        """Return an integer in [low, high) from exactly one draw: the high 64 bits of draw * (high - low).

        The bias against a uniform choice is below (high - low) / 2**64. Raises ValueError on an empty range.
        """
        if not 0 < high - low <= MASK64:
            raise ValueError(f"random_int: [{low}, {high}) is empty or wider than 64 bits")
        return low + ((self.next() * (high - low)) >> 64)

    def draws(self, n: int) -> np.ndarray:
        """Return the next n draws, uint64 (n,): the same as n calls of next()."""
        counters = np.arange(1, n + 1, dtype=np.uint64)
        z = counters * np.uint64(GAMMA) + np.uint64(self.state)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX2)
        self.state = (self.state + n * GAMMA) & MASK64
        return z ^ (z >> np.uint64(31))

    def integers(self, n: int, below: int) -> np.ndarray:
        """Return n integers in [0, below), int64 (n,): the same as n calls of random_int(0, below). below <= 2**63."""
        if not 0 < below <= 1 << 63:
            raise ValueError(f"integers: below must be in [1, 2**63], got {below}")
        x = self.draws(n)
        # High 64 bits of a 64 x 64 bit product, from 32-bit halves: numpy has no 128-bit integer.
        low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
        x0, x1 = x & low32, x >> shift
        b0, b1 = np.uint64(below & 0xFFFFFFFF), np.uint64(below >> 32)
        middle = x1 * b0 + ((x0 * b0) >> shift)
        carry = (middle & low32) + x0 * b1
        return (x1 * b1 + (middle >> shift) + (carry >> shift)).astype(np.int64)


class BatchRng:
    """The host generator of the original contract: one lock-guarded Splitmix64, and an indexed side without any state.

    `batch_rng` below is the process-wide one. next() and random_int() share one sequence among all threads, so what a
    thread gets depends on the scheduler; `at` does not. The trainer draws only from `at`.
    """

    def __init__(self, seed: int | None = None):
        self._lock = threading.Lock()
        self._seed: int | None = None
        self._rng: Splitmix64 | None = None
        if seed is not None:
            self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start the sequence of `seed`. Raises UsageError if it is no seed."""
        value = parse_seed(seed, "BatchRng.seed")
        with self._lock:
            self._seed, self._rng = value, Splitmix64(value)

    def reset(self) -> None:
        """Forget the seed and the state; draws raise until the next seed()."""
        with self._lock:
            self._seed = self._rng = None

    def _seeded(self) -> Splitmix64:
        if self._rng is None:
            raise RuntimeError("BatchRng has no seed; call seed() or mlxdet.seed_everything() first")
        return self._rng

    def next(self) -> int:
        """Return the next draw in [0, 2**64). Raises RuntimeError when unseeded: there is no silent default."""
        with self._lock:
            return self._seeded().next()

    def random_int(self, low: int, high: int) -> int:
        """Return an integer in [low, high) from one draw. Raises RuntimeError when unseeded, ValueError if empty."""
        with self._lock:
            return self._seeded().random_int(low, high)

    def get_state(self) -> tuple[int, int]:
        """Return (seed, position) such that set_state() continues here. Raises RuntimeError when unseeded."""
        with self._lock:
            state = self._seeded().state
            assert self._seed is not None
            return self._seed, state

    def set_state(self, state: tuple[int, int]) -> None:
        """Continue from what get_state() returned."""
        seed, position = parse_seed(state[0], "BatchRng.set_state"), parse_seed(state[1], "BatchRng.set_state")
        with self._lock:
            self._seed, self._rng = seed, Splitmix64(position)

    def at(self, name: str, *counters: int) -> Splitmix64:
        """Return a fresh generator that depends on the seed, the name and the counters alone. Takes no draw."""
        seed = self._seed
        if seed is None:
            raise RuntimeError("BatchRng has no seed; call seed() or mlxdet.seed_everything() first")
        return Splitmix64(stream(seed, name, *counters))


batch_rng = BatchRng()


def seed_everything(seed: int) -> None:
    """Seed MLX's generator (of the calling thread: its state is per thread) and the process-wide `batch_rng` together.

    Raises UsageError if `seed` is not an integer in [0, 2**64). Imports MLX, its environment pinned first.
    """
    value = parse_seed(seed, "seed_everything")
    if "mlx.core" not in sys.modules:
        from mlxdet import backends

        backends.activate()
    import mlx.core as mx

    mx.random.seed(value)
    batch_rng.seed(value)
