"""Task: a GPT that reads bytes. digits.py, in this folder, lists what an entry point needs of a task.

Pre-norm blocks, learned positions, GPT-2's initial weights. No tokenizer: a token is a byte.
"""

import argparse
import gzip
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

UNIT = "tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the text and the shape of the model."""
    given = os.environ.get("CLOUDTRAIN_INPUT_TRAIN", "")
    parser.add_argument("--train", default=given, help="a text, plain or .gz, or a folder that holds it and no other")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64, help="tokens in a sample")
    parser.add_argument("--vocabulary", type=int, default=256, help="rows above 256 only make the model larger")
    parser.add_argument("--dropout", type=float, default=0.0)


class Block(nn.Module):
    """Attention and a perceptron, each added to its input."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.heads, self.dropout = args.heads, args.dropout
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv, self.mix = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        self.up, self.down = nn.Linear(args.width, 4 * args.width), nn.Linear(4 * args.width, args.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.mix(seen.transpose(1, 2).reshape(batch, context, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))

    def drop(self, x: Tensor) -> Tensor:
        """Apply dropout, in training only."""
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Map of bytes (batch, context) to scores of the next bytes (batch, context, vocabulary)."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(args.vocabulary, args.width), nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # two in each block add to the residual stream: they start smaller
                adds = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * args.layers) ** 0.5 if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(args: argparse.Namespace) -> nn.Module:
    """Return the GPT that the flags describe."""
    if args.width % args.heads:
        raise SystemExit(f"gpt.py: --width {args.width} is not a multiple of --heads {args.heads}")
    return GPT(args)


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Samples of a text: sample i has its i-th ``context`` bytes, and the same bytes shifted by one."""

    def __init__(self, data: Tensor, context: int) -> None:
        self.data, self.context = data, context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.data[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def build_datasets(args: argparse.Namespace) -> tuple[Text, Text, Text]:
    """Split the text: nine tenths to train, then one twentieth each to validate and to test."""
    try:
        (file,) = Path(args.train).iterdir() if os.path.isdir(args.train) else [Path(args.train)]
        text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, ValueError) as error:
        raise SystemExit(f"gpt.py: --train {args.train!r} is not a text or a folder with just one: {error}") from None
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    train, validation, test = data.split([len(data) - 2 * (len(data) // 20), len(data) // 20, len(data) // 20])
    return Text(train, args.context), Text(validation, args.context), Text(test, args.context)


def compute_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross-entropy in nats, and the number of bytes that were predicted correctly."""
    tokens, following = batch
    scores = model(tokens).flatten(0, 1)
    following = following.flatten()
    loss = F.cross_entropy(scores.float(), following, reduction="sum")
    return loss, {"accuracy": (scores.argmax(1) == following).sum()}


def count(batch: list[Tensor]) -> int:
    """Return the number of tokens."""
    return batch[1].numel()


def flops_per_item(model: nn.Module) -> float:
    """Return 6 for each weight that multiplies, plus attention's 12 x layers x width x context (PaLM paper)."""
    context, width = model.positions.weight.shape
    weights = sum(p.numel() for p in model.parameters()) - model.tokens.weight.numel() - model.positions.weight.numel()
    return 6 * weights + 12 * len(model.blocks) * width * context
