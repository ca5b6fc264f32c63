"""The model of 08: a decoder as small as nanoGPT's.

Token and position embeddings, blocks with a layer norm before attention and before the two linear
layers, and a head. No biases and no dropout. The head is not tied to the token embedding: tensor
parallelism would make two parameters of a shared one.
"""

import torch
from torch import nn
from torch.nn import functional as F


class GPT(nn.Module):
    """Predict the next token at each position.

    Args:
        layers: int, the number of blocks.
        heads: int, of the attention of each block.
        width: int, the size of the vector of a token; a multiple of heads.
        context: int, the largest number of tokens that forward takes.
        vocabulary: int, the number of different tokens.

    forward takes int64 (N, T) and returns logits (N, T, vocabulary).
    """

    def __init__(self, layers, heads, width, context, vocabulary=256):
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(heads, width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                # The head sees the sum of all blocks, so what adds to it begins smaller.
                adds = name.endswith(("output.weight", "contract.weight"))
                nn.init.normal_(weight, std=(width * (2 * layers if adds else 1)) ** -0.5)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


class Block(nn.Module):
    """Causal attention, then two linear layers; each adds to its input.

    Args:
        heads, width: see GPT.
    """

    def __init__(self, heads, width):
        super().__init__()
        self.head_size = width // heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        # The rows of a head lie together (query, key, value of head 0, then of head 1), so that a
        # cut between two heads leaves each head whole.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.output(self.attend(self.query_key_value(self.norm1(x))))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))

    def attend(self, qkv):
        """Let each position look at those before it, in the heads that this rank has."""
        batch, length, _ = qkv.shape
        qkv = qkv.view(batch, length, -1, 3, self.head_size)  # -1: the heads of this rank
        query, key, value = qkv.permute(3, 0, 2, 1, 4)  # (batch, heads, length, head size) each
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, -1)


@torch.no_grad()
def generate(model, tokens, count, generator):
    """Return int64 (1, T + count): tokens, and `count` more, each drawn as the model expects it.

    With a sharded model this is a collective: all ranks call it, with generators of one seed.

    Args:
        tokens: int64 (1, T) on the device of the model.
        generator: torch.Generator on the CPU.
    """
    for _ in range(count):
        logits = model(tokens[:, -model.context :])[:, -1]
        probabilities = logits.float().softmax(dim=-1).cpu()
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(tokens.device)], dim=1)
    return tokens
