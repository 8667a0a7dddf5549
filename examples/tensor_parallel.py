"""Tensor parallel, FSDP2 and HSDP on one mesh of processes: one model in several layouts, with the same losses.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py --train examples/data/persuasion.txt.gz
    cloudtrain submit examples/tensor_parallel.py --nodes 2 --nproc-per-node 2 --max-runtime 10m \
        --input train=examples/data/persuasion.txt.gz

A layout RxSxT is a mesh of replicate x shard x tensor. T processes share each matrix of a layer. S share the parameters
(FSDP2, gathered block by block). R hold copies and sum gradients (with S > 1 that is HSDP). Put T inside a node, where
the links are fast: ranks of the last dimension are neighbours. Look, for each layout, for the losses of a small
byte-level GPT, their distance from the same steps in one process, and a rank's share of the parameters.
"""

import argparse
import gzip
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold the group beyond its end
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HEADS, BLOCKS, CONTEXT, BYTES = 64, 4, 2, 64, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        # -1: a rank with a slice of q, k and v has fewer heads by that factor.
        q, k, v = (part(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss of predicting each next byte."""
        x = self.bytes(text[:, :-1]) + self.places(torch.arange(CONTEXT, device=text.device))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def spread(model: Gpt, mesh: DeviceMesh) -> None:
    """Apply tensor parallel first, then FSDP2 over the rest of the mesh."""
    cut, tensor = ColwiseParallel, mesh["tensor"]
    plan = {"q": cut(), "k": cut(), "v": cut(), "out": RowwiseParallel(), "up": cut(), "down": RowwiseParallel()}
    if tensor.size() > 1:
        for block in model.blocks:
            parallelize_module(block, tensor, plan)
        parallelize_module(model, tensor, {"head": ColwiseParallel(output_layouts=Replicate())})
    data = mesh["replicate", "shard"]  # two dimensions: FSDP2 shards over the last one, and copies over the first
    for block in model.blocks:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)


def train(model: Gpt, text: Tensor, args: argparse.Namespace, part: int = 0, parts: int = 1) -> list[Tensor]:
    """Train, and return the mean loss of rows ``part`` of ``parts`` of each global batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(args.steps):
        starts = torch.randint(len(text) - CONTEXT, (args.global_batch,), generator=torch.Generator().manual_seed(step))
        rows = starts.chunk(parts)[part][:, None].to(text.device) + torch.arange(CONTEXT + 1, device=text.device)
        loss = model(text[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train_in(layout: tuple[int, int, int], text: Tensor, args: argparse.Namespace) -> tuple[list[float], float]:
    """Return the losses of the global batches, and this rank's share of the parameters."""
    replicate, shard, tensor = layout
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh(text.device.type, layout, mesh_dim_names=names)
    model = model_on(text.device)
    whole = sum(p.numel() for p in model.parameters())
    spread(model, mesh)
    here = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    # Ranks that share matrices work on the same rows; the others divide the batch.
    losses = torch.stack(train(model, text, args, dist.get_rank() // tensor, replicate * shard))
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist(), here / whole


def model_on(device: torch.device) -> Gpt:
    torch.manual_seed(0)
    return Gpt().to(device)


def layout_of(word: str) -> tuple[int, int, int]:
    try:
        replicate, shard, tensor = (int(size) for size in word.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not like 1x2x2 (replicate x shard x tensor)") from None
    return replicate, shard, tensor


def main() -> None:
    env, flags = os.environ, argparse.ArgumentParser(description="One model, laid out over processes in several ways.")
    flags.add_argument("--train", default=env.get("CLOUDTRAIN_INPUT_TRAIN", ""), help="a text, gzipped")
    flags.add_argument("--layouts", type=layout_of, nargs="+", default=[(1, 1, 4), (1, 2, 2), (2, 2, 1)])
    flags.add_argument("--global-batch", type=int, default=16)
    flags.add_argument("--steps", type=int, default=20)
    args = flags.parse_args()
    if "RANK" not in env:
        raise SystemExit("tensor_parallel.py: it needs several processes: start it with torchrun --nproc-per-node 4")
    rank, world, local = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    for replicate, shard, tensor in args.layouts:
        name, size = f"{replicate}x{shard}x{tensor}", replicate * shard * tensor
        if min(replicate, shard, tensor) < 1 or size != world:
            raise SystemExit(f"tensor_parallel.py: --layouts {name} is {size} processes, and there are {world}")
        if HEADS % tensor or args.global_batch % (replicate * shard):
            raise SystemExit(f"tensor_parallel.py: --layouts {name} divides {HEADS} heads, or the batch, unevenly")
    try:
        with gzip.open(args.train) as file:
            text = torch.tensor(list(file.read()))
    except (OSError, EOFError) as error:
        raise SystemExit(f"tensor_parallel.py: --train {args.train!r} is no gzipped text: {error}") from None
    gpu = torch.cuda.device_count() > local
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    torch.set_num_threads(1)
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    text = text.to(device)
    alone = torch.stack(train(model_on(device), text, args)).tolist()
    for layout in args.layouts:
        losses, held = train_in(layout, text, args)
        if rank == 0:
            apart = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
            print(f"{'x'.join(map(str, layout))}: loss {losses[0]:.4f} to {losses[-1]:.4f}", end=", ")
            print(f"at most {apart:.1e} from one process; rank 0 holds {held:.0%} of the parameters", flush=True)
    dist.barrier()  # meshes and their groups stay for good, so no work may be pending at the end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
