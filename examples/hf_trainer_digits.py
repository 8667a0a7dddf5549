"""A script for Hugging Face's Trainer as in its documentation, submitted unchanged: it knows nothing of cloudtrain.

    torchrun --nproc-per-node 2 examples/hf_trainer_digits.py --data_file examples/data/digits.csv.gz \
        --output_dir checkpoints
    cloudtrain submit examples/hf_trainer_digits.py --nodes 2 --retries 1 --max-runtime 10m \
        --input train=examples/data/digits.csv.gz -- --data_file {inputs.train} --output_dir {checkpoint_dir} \
        --resume_from_checkpoint {resume_from?} --num_train_epochs 8 --save_strategy epoch --learning_rate 5e-3 \
        --per_device_train_batch_size 32 --use_cpu true

All flags but --data_file are `TrainingArguments`. Without GPUs, Trainer needs `--use_cpu true`, with and without
cloudtrain: otherwise each process silently trains alone. A small Vision Transformer, made from its configuration,
learns digits. Look for as many steps as the processes together need, steps that continue after a kill, and the final
`eval_accuracy`.
"""

import gzip
from dataclasses import dataclass, field

import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed


@dataclass
class DataArguments:
    data_file: str = field(metadata={"help": "digits.csv.gz"})


class Digits(torch.utils.data.Dataset):
    def __init__(self, table: torch.Tensor) -> None:
        self.pixel_values, self.labels = table[:, :64].view(-1, 1, 8, 8) / 8 - 1, table[:, 64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixel_values[i], "labels": self.labels[i]}


def main() -> None:
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    try:
        with gzip.open(data_args.data_file, "rt") as rows:
            table = torch.tensor([[int(value) for value in row.split(",")] for row in rows])
    except (OSError, EOFError, ValueError) as error:
        raise SystemExit(f"hf_trainer_digits.py: --data_file {data_args.data_file!r}: {error}") from None
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        num_labels=10,
    )
    trainer = Trainer(
        model=ViTForImageClassification(config),
        args=training_args,
        train_dataset=Digits(table[360:]),
        eval_dataset=Digits(table[:360]),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())},
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    if trainer.is_world_process_zero():
        print(f"{training_args.world_size} processes, {trainer.state.global_step} steps", flush=True)
    # A process that ends while its gloo threads work can crash (docs/examples.md). After a barrier they rest.
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
