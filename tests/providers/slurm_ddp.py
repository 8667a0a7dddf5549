"""DDP with DataLoader workers and no signal handler: it saves on a stop notice, and prints exact losses."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Data(torch.utils.data.Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 1 << 20

    def __getitem__(self, step):
        return torch.randn(16, 8, generator=torch.Generator().manual_seed(step * 1000 + self.rank))


dist.init_process_group("gloo")
rank, steps = dist.get_rank(), int(os.environ["STEPS"])
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
first = 0
if os.environ["CLOUDTRAIN_RESUME_FROM"]:
    saved = torch.load(os.environ["CLOUDTRAIN_RESUME_FROM"] + "/state.pt")
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]


def save(step):
    folder = os.path.join(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], f"step-{step}")
    os.makedirs(folder, exist_ok=True)
    torch.save(
        {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder + "/state.pt"
    )


loader = torch.utils.data.DataLoader(Data(rank), sampler=range(first, steps), batch_size=None, num_workers=1)
print(f"from step {first}", flush=True)
for step, x in enumerate(loader, first):
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(float(os.environ.get("PACE", "0.05")))
    stop = torch.tensor([float(os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]))])
    dist.all_reduce(stop)
    if rank == 0 and (stop.item() or (step + 1) % 20 == 0):
        save(step + 1)
    if stop.item():
        print(f"stopped after {step + 1} steps", flush=True)
        break
dist.all_reduce(loss)
if rank == 0 and not stop.item():
    print(f"loss {loss.item().hex()}", flush=True)
dist.destroy_process_group()
