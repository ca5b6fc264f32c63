"""The built-in dataset: drawn shapes, so that every script trains at once, with no download.

An image is a pure function of (seed, index): the same bytes on every platform, in any order, on any
number of processes. Integers alone make it so; floating point may round differently elsewhere.

Only the form tells the class. Place, size, angle and both colours are random, and the shape may be
lighter or darker than the background, so neither a colour nor the brightness of a pixel tells the
class.
"""

import math

import numpy as np

CLASSES = (
    "disk",
    "ring",
    "square",
    "frame",
    "triangle",
    "cross",
    "bars",
    "checks",
    "crescent",
    "dots",
)
SIZE = 32  # pixels a side
NOISE = 56  # levels of noise added to every pixel
CONTRAST = 72  # least difference of the two colours in each channel
RADIUS = (10, 13)  # least and greatest half-size in pixels
TURN = 6  # greatest angle to either side, in 64ths of a full turn
R = 1024  # half the size of a shape in its own coordinates

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
COS = np.array([round(R * math.cos(2 * math.pi * k / 64)) for k in range(64)], dtype=np.int32)
SIN = np.roll(COS, 16)


def render(seed, indices):
    """Draw the images of the given indices.

    Args:
        seed: int; the training set and the test set are two seeds.
        indices: integers, shape (N,).

    Returns:
        (images, labels): uint8 (N, 3, 32, 32) and int64 (N,), a position in CLASSES.
    """
    indices = np.asarray(indices, dtype=np.uint64)

    def draw(k, n):
        """The k-th random number of every image, 0 to n - 1."""
        stream = _mix(
            np.full(1, seed, dtype=np.uint64) + GOLDEN * np.full(1, k + 1, dtype=np.uint64)
        )
        bits = _mix(stream + GOLDEN * (indices + np.uint64(1)))
        return ((bits >> np.uint64(32)) * np.uint64(n) >> np.uint64(32)).astype(np.int32)

    # Where, how large and how turned. Lengths are counted in half pixels, so that they stay whole.
    labels = draw(0, len(CLASSES))
    radius = 2 * RADIUS[0] + draw(1, 2 * (RADIUS[1] - RADIUS[0]) + 1)
    room = SIZE - radius
    x0 = draw(2, 2**16) * (2 * room + 1) // 2**16 - room
    y0 = draw(3, 2**16) * (2 * room + 1) // 2**16 - room
    angle = draw(4, 2 * TURN + 1) - TURN
    cos, sin = R * COS[angle] // radius, R * SIN[angle] // radius

    # The masks, class by class: each pixel of an image in the coordinates of its shape.
    pixel = 2 * np.arange(SIZE, dtype=np.int32) - SIZE + 1
    mask = np.empty((len(indices), SIZE, SIZE), dtype=bool)
    for label in range(len(CLASSES)):
        of = np.flatnonzero(labels == label)
        dx = (pixel - x0[of, None])[:, None, :]
        dy = (pixel - y0[of, None])[:, :, None]
        c, s = cos[of, None, None], sin[of, None, None]
        mask[of] = _inside(label, (c * dx + s * dy) // R, (c * dy - s * dx) // R)

    # Two colours and a window of noise. Nothing overflows: colours leave room for the noise.
    top = 256 - NOISE
    dark = np.stack([draw(5 + c, top - CONTRAST) for c in range(3)], axis=1)
    light = np.stack([draw(8 + c, 2**16) for c in range(3)], axis=1)
    light = dark + CONTRAST + (top - CONTRAST - dark) * light // 2**16
    swap = np.stack([draw(11 + c, 2) for c in range(3)], axis=1).astype(bool)
    front = np.where(swap, dark, light).astype(np.uint8)[:, :, None, None]
    back = np.where(swap, light, dark).astype(np.uint8)[:, :, None, None]
    noise = NOISE_WINDOWS[draw(14, len(NOISE_WINDOWS))].reshape(-1, 3, SIZE, SIZE)
    return noise + np.where(mask[:, None], front, back), labels.astype(np.int64)


def _inside(label, u, v):
    """Which points (u, v) lie inside a shape; both are int32, about -R to R within it."""
    x = abs(u)
    y = abs(v)
    square = u * u + v * v
    far, near = np.maximum(x, y), np.minimum(x, y)
    # all cover a similar area, so that the average colour does not tell the class
    match CLASSES[label]:
        case "disk":
            return square < R * R * 7 // 10
        case "ring":
            return abs(square - R * R * 13 // 20) < R * R * 7 // 20
        case "square":
            return far < R * 3 // 4
        case "frame":
            return abs(far - R * 31 // 40) < R * 7 // 40
        case "triangle":
            return (2 * x + v < R * 9 // 8) & (v > -R * 7 // 8)
        case "cross":
            return (near < R // 3) & (far < R)
        case "bars":
            return (far < R) & ((u + R) * 5 // (2 * R) % 2 == 0)
        case "checks":
            return (far < R) & (u * v > 0)
        case "crescent":
            return (square < R * R) & ((u - R * 3 // 5) ** 2 + v * v > R * R * 11 // 20)
        case "dots":
            return (x - R * 5 // 8) ** 2 + v * v < (R // 2) ** 2


def _mix(x):
    """Scramble 64-bit counters into random bits: SplitMix64's finaliser (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _noise_windows(size=2**20):
    """Every window of one long strip of noise: copying is far faster than drawing."""
    counters = GOLDEN * np.arange(1, size // 8 + 1, dtype=np.uint64)
    strip = _mix(counters).astype("<u8").view(np.uint8).astype(np.uint16) * NOISE >> 8
    return np.lib.stride_tricks.sliding_window_view(strip.astype(np.uint8), 3 * SIZE * SIZE)


NOISE_WINDOWS = _noise_windows()
