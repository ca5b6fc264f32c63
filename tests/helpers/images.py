"""Small datasets on disk."""

import struct
from pathlib import Path

import numpy as np
from PIL import Image


def write_images(root, split, size, classes=("cat", "dog"), per_class=12, suffix=".png"):
    """Write an ImageFolder tree of noise, each class in its own brightness; returns the folder
    root.
    """
    rng = np.random.default_rng(0)
    for k, name in enumerate(classes):
        folder = Path(root, split, name)
        folder.mkdir(parents=True)
        for i in range(per_class):
            pixels = rng.integers(0, 100, (*size, 3)) + 60 * k
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:03}{suffix}")
    return Path(root)


def write_mnist(folder, n):
    """Write the four files of MNIST, n images each, in their own format."""
    folder.mkdir(parents=True)
    for split in ("train", "t10k"):
        pixels = np.arange(n * 784, dtype=np.uint32).astype(np.uint8)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(
            struct.pack(">4I", 2051, n, 28, 28) + pixels.tobytes()
        )
        labels = (np.arange(n) % 10).astype(np.uint8)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2I", 2049, n) + labels.tobytes()
        )


def cut_off(path):
    """Damage an image: keep the first 300 bytes of its file."""
    path.write_bytes(path.read_bytes()[:300])
