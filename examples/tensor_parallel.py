"""Decode with a `transformers` model sharded over ranks, and check that all of them draw the same tokens.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py                      # on CPUs, over gloo
    torchrun --nproc-per-node 8 examples/tensor_parallel.py --device cuda        # one GPU a rank
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --device cuda --share-gpu

The LM head and the MLPs are sharded with DTensor, by PyTorch's own `parallelize_module`. The step is the one of
`decode.py`: softmax and multinomial over all logits. `backend="flashsampling"` leaves the logits on the ranks
that have them.
"""

import argparse
import os
import sys

# A rank that waits by spinning takes a core from the rank that it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import decode
import tiny_lm
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, AutoTokenizer

import fs_inductor

PLAN = {
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    # Eagerly, this gathers all logits on every rank.
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = decode.Parser(prog="tensor_parallel.py", description=__doc__.split("\n")[0])
    option = parser.add_argument
    option("--model", type=decode.checkpoint_folder, metavar="DIR", help="a local Llama or Qwen checkpoint")
    option("--device", choices=("cpu", "cuda"), default="cpu")
    option("--share-gpu", action="store_true", help="all ranks on one GPU: a trial, slow")
    option("--batch", type=decode.count, default=4, help="rows decoded together (default: %(default)s)")
    option("--tokens", type=decode.count, default=40, help="new tokens per row (default: %(default)s)")
    option("--temperature", type=decode.temperature_value, default=0.8, help="(default: %(default)s)")
    option("--prompt", default="The value of", help="(default: %(default)r)")
    option("--seed", type=decode.seed_number, default=0, help="(default: %(default)s)")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    return parser.parse_args(argv)


def start_ranks(kind: str, share_gpu: bool) -> torch.device:
    """Join the process group; returns this rank's device."""
    if kind == "cpu":
        dist.init_process_group("gloo")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
        return torch.device("cpu")
    if share_gpu:
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    device = torch.device("cuda", 0 if share_gpu else int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo" if share_gpu else "nccl")  # NCCL wants a GPU a rank
    return device


def load_model(folder, device: torch.device, recipe: tiny_lm.Recipe):
    """The tokenizer and the whole model, on every rank alike."""
    if folder is None:
        # One rank trains, or finds its work of an earlier run; the others wait for it.
        if dist.get_rank() == 0:
            with torch.enable_grad():
                folder = tiny_lm.load_or_train(device, recipe)
        box = [folder]
        dist.broadcast_object_list(box, src=0)
        folder = box[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    return AutoTokenizer.from_pretrained(folder), model


def decode_both(decoder: decode.Decoder, temperature: float, seed: int) -> dict[str, torch.Tensor]:
    """Greedy and sampled tokens `[B, tokens]` of compiled steps; `seed` is the same on every rank."""
    torch._dynamo.reset()
    greedy = torch.compile(decode.greedy_step, backend="flashsampling", options=decode.OPTIONS)
    sampled = torch.compile(decode.sample_step, backend="flashsampling", options=decode.OPTIONS)
    tokens = {"greedy": decoder.decode(greedy)}
    torch.manual_seed(seed)
    tokens["sampled"] = decoder.decode(sampled, temperature)
    return tokens


def ranks_agree(tokens: torch.Tensor) -> bool:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tokens)
    return all(torch.equal(tokens, other) for other in everyone)


@torch.no_grad()
def main(argv: list[str] | None = None, recipe: tiny_lm.Recipe = tiny_lm.DEFAULT) -> int:
    args = parse(argv)
    decode.quiet_transformers()
    device = start_ranks(args.device, args.share_gpu)
    world = dist.get_world_size()
    say = print if dist.get_rank() == 0 else lambda *text: None

    tokenizer, model = load_model(args.model, device, recipe)
    vocab = model.config.vocab_size
    say(
        f"{type(model).__name__}, vocabulary {vocab:,}, {model.dtype}, on {world} ranks of {device.type}: "
        f"up to {-(-vocab // world):,} ids a rank; batch {args.batch}, temperature {args.temperature}"
    )
    prompt = tokenizer(args.prompt, return_tensors="pt").input_ids.to(device)
    decoder = decode.Decoder(model, prompt, args.batch, args.tokens)
    whole = decode_both(decoder, args.temperature, args.seed)
    parallelize_module(model, init_device_mesh(device.type, (world,)), PLAN)
    sharded = decode_both(decoder, args.temperature, args.seed)

    say(f"\n{args.prompt}{tokenizer.decode(sharded['sampled'][0], skip_special_tokens=True)}\n")
    agreed = True
    for name, tokens in sharded.items():
        same = ranks_agree(tokens)
        agreed = agreed and same
        verdict = f"all {world} ranks agree" if same else "THE RANKS DISAGREE"
        say(f"{name:8} {verdict}; {compare(tokens, whole[name])}")

    report = fs_inductor.explain(decode.sample_step, options=decode.OPTIONS)(
        model, decoder.prefill(), decoder.cache, args.temperature
    )
    say(f"\nwhat was fused in one sampling step\n{report}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if agreed else 1


def compare(tokens: torch.Tensor, whole: torch.Tensor) -> str:
    """One line on whether `tokens` are those of the model before it was sharded."""
    same = tokens == whole
    if same.all():
        return f"as the unsharded model's, all {same.numel():,}"
    first = int((~same).any(dim=0).nonzero()[0])
    return f"unlike the unsharded model's from token {first} on (sums over ranks round differently)"


if __name__ == "__main__":
    sys.exit(main())
