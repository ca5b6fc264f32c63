"""Small images, held in memory as one tensor, so that a batch is one index operation."""

import torch
from torch.utils.data import Dataset


class MemoryImages(Dataset):
    """Images in memory, fetched by the batch.

    Args:
        images: uint8 (N, C, H, W).
        targets: int64 (N,).
        num_classes: int.
    """

    in_memory = True
    note = ""

    def __init__(self, images, targets, num_classes):
        self.images = images
        self.targets = targets
        self.num_classes = num_classes
        self.channels = images.shape[1]
        self.image_size = tuple(images.shape[2:])  # height, width

    def __len__(self):
        return len(self.targets)

    def __getitems__(self, indices):
        """Return a whole batch. The DataLoader calls this instead of __getitem__."""
        return self.images[indices], self.targets[indices]

    def channel_stats(self):
        """Return mean and standard deviation of each channel, (C,) each, of levels 0 to 255."""
        levels = torch.arange(256, dtype=torch.float64)
        counts = torch.zeros(self.channels, 256, dtype=torch.float64)
        for part in self.images.split(1000):  # in parts, because flatten copies
            counts += torch.stack([c.flatten().bincount(minlength=256) for c in part.unbind(1)])
        share = counts / counts.sum(1, keepdim=True)
        mean = share @ levels
        variance = share @ levels.square() - mean.square()
        return mean, variance.clamp(min=1).sqrt()


def choose(n, limit):
    """Return sorted indices: all n, or `limit` of them chosen at random, the same in every run."""
    if limit is None or limit >= n:
        return torch.arange(n)
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:limit]
    return chosen.sort().values
