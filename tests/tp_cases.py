"""Steps whose LM head is sharded over ranks, in every spelling, built on a fake process group of any rank and world."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from support import BATCH, FEATURES, LENGTH
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

VOCABULARIES = (96, 100, 12)
RANKS = ((2, 0), (2, 1), (8, 0), (8, 7))
"""World and rank: the first and the last of two, and of eight."""


class Model(nn.Module):
    def __init__(self, vocab: int, bias: bool, dtype: torch.dtype):
        super().__init__()
        self.lm_head = nn.Linear(FEATURES, vocab, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.lm_head(x)


@dataclass
class Env:
    """One rank of a fake process group, and the sizes of a case's head on it."""

    rank: int
    world: int
    mesh: DeviceMesh
    vocab: int

    @property
    def capacity(self) -> int:
        return math.ceil(self.vocab / self.mesh.size())

    @property
    def rows(self) -> int:
        return max(0, min(self.capacity, self.vocab - self.mesh.get_local_rank() * self.capacity))

    def model(self, layout=None, local: bool = True, bias: bool = False, dtype=torch.float32) -> nn.Module:
        plan = ColwiseParallel(output_layouts=layout or Replicate(), use_local_output=local)
        return parallelize_module(Model(self.vocab, bias, dtype), self.mesh, {"lm_head": plan})

    def shard(self) -> torch.Tensor:
        """This rank's rows of a weight that is no DTensor."""
        return torch.randn(self.rows, FEATURES)


Step = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class TpCase:
    """make(env) gives the step. inputs: its arguments, whose first size is the batch, or from env.

    cut: ids that the step takes off the end of the vocabulary. two_dims: on a mesh of two dimensions, the head on the
    second. dynamic: whether the batch can be dynamic.
    """

    make: Callable[[Env], Step]
    inputs: Callable[[Env], list]
    cut: int = 0
    two_dims: bool = False
    dynamic: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, TpCase] = {}
NOT_FUSED: dict[str, TpCase] = {}


def case(*shapes: tuple, table: dict[str, TpCase] = CASES, **kwargs: Any) -> Callable:
    """Registers a function that makes a step. shapes: of the step's inputs; "V" stands for the vocabulary."""

    def inputs(env: Env) -> list:
        return [torch.randn([env.vocab if size == "V" else size for size in shape]) for shape in shapes]

    def register(make: Callable) -> Callable:
        table[make.__name__] = TpCase(make, inputs, **kwargs)
        return make

    return register


ROWS, ONE_ROW, SEQUENCE = (BATCH, FEATURES), (1, FEATURES), (BATCH, LENGTH, FEATURES)


def draw(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial((logits / 0.7).softmax(-1), 1)


# -- a parallel style that replicates the logits --------------------------------------------------------------------


@case(ROWS)
def colwise(env):
    model = env.model()
    return lambda x: draw(model(x))


@case(ONE_ROW, dynamic=False)
def colwise_one_row(env):
    model = env.model()
    return lambda x: draw(model(x))


@case(SEQUENCE)
def colwise_last_position(env):
    model = env.model()
    return lambda x: draw(model(x)[:, -1].float())


@case(SEQUENCE)
def colwise_last_position_first(env):
    model = env.model()
    return lambda x: draw(model(x[:, -1:])[:, 0])


@case(SEQUENCE, (BATCH,), dynamic=False)
def colwise_position_of_each_row(env):
    model = env.model()
    return lambda x, lengths: draw(model(x)[torch.arange(BATCH), lengths.abs().long().clamp(max=LENGTH - 1)])


@case(ROWS)
def colwise_greedy(env):
    model = env.model()
    return lambda x: model(x).argmax(-1)


@case(ROWS)
def colwise_several_draws(env):
    model = env.model()
    return lambda x: torch.multinomial(model(x).softmax(-1), 3, replacement=True)


@case(ROWS)
def colwise_race(env):
    model = env.model()

    def step(x):
        probs = model(x).softmax(-1)
        return (probs / torch.empty_like(probs).exponential_(1)).argmax(-1)

    return step


@case(ROWS, cut=3)
def colwise_padded_vocabulary(env):
    model = env.model()
    return lambda x: draw(model(x)[:, : env.vocab - 3])


@case(ROWS, two_dims=True)
def colwise_mesh_of_two_dimensions(env):
    model = env.model()
    return lambda x: draw(model(x))


# -- the result stays a DTensor -------------------------------------------------------------------------------------


@case(ROWS)
def dtensor_to_local(env):
    model = env.model(local=False)
    return lambda x: draw(model(x).to_local())


@case(ROWS)
def dtensor_full_tensor(env):
    model = env.model(local=False)
    return lambda x: draw(model(x).full_tensor())


@case(ROWS)
def dtensor_draw(env):
    model = env.model(local=False)
    return lambda x: draw(model(x)).to_local()


@case(ROWS)
def dtensor_argmax(env):
    model = env.model(local=False)
    return lambda x: model(x).argmax(-1).to_local()


# -- logits stay sharded, and the user gathers ----------------------------------------------------------------------


@case(ROWS)
def shard_redistribute(env):
    model = env.model(Shard(-1), local=False)
    return lambda x: draw(model(x).redistribute(placements=[Replicate()]).to_local())


@case(ROWS)
def shard_full_tensor(env):
    model = env.model(Shard(-1), local=False)
    return lambda x: draw(model(x).full_tensor())


@case(ONE_ROW, dynamic=False)
def shard_one_row(env):
    model = env.model(Shard(-1), local=False)
    return lambda x: draw(model(x).full_tensor())


@case(SEQUENCE)
def shard_last_position(env):
    model = env.model(Shard(-1), local=False)
    return lambda x: (model(x) * 0.5).full_tensor()[:, -1].argmax(-1)


@case(ROWS)
def shard_pointwise_in_float32(env):
    model = env.model(Shard(-1), local=False, dtype=torch.bfloat16)
    return lambda x: draw((torch.tanh(model(x.bfloat16()).float() / 30) * 30).full_tensor())


@case(ROWS, two_dims=True)
def shard_mesh_of_two_dimensions(env):
    model = env.model(Shard(-1), local=False)
    return lambda x: model(x).full_tensor().argmax(-1)


@case(ROWS, ("V",))
def shard_bias_of_the_shard(env):
    model = env.model(Shard(-1), local=False)
    bias = distribute_tensor(torch.randn(env.vocab), env.mesh, [Shard(0)])
    return lambda x, _: draw((model(x) + bias).full_tensor())


# -- collectives by hand --------------------------------------------------------------------------------------------


def gather(env: Env, local: torch.Tensor) -> torch.Tensor:
    padded = F.pad(local, (0, env.capacity - env.rows))
    return collectives.all_gather_tensor(padded, local.dim() - 1, env.mesh)[..., : env.vocab]


@case(ROWS)
def explicit(env):
    weight = env.shard()
    return lambda x: gather(env, F.linear(x, weight)).argmax(-1)


@case(SEQUENCE)
def explicit_last_position(env):
    weight = env.shard()
    return lambda x: draw(gather(env, F.linear(x, weight).float() * 0.5)[:, -1])


def gather_into(env: Env, local: torch.Tensor) -> torch.Tensor:
    """The shards of all ranks behind each other: [world * B, C]."""
    padded = F.pad(local, (0, env.capacity - env.rows))
    out = padded.new_empty(env.mesh.size() * len(padded), env.capacity)
    dist.all_gather_into_tensor(out, padded, group=env.mesh.get_group())
    return out


@case(ROWS)
def into_one_tensor_moved(env):
    weight = env.shard()

    def step(x):
        apart = gather_into(env, F.linear(x, weight)).view(env.mesh.size(), len(x), env.capacity)
        return draw(apart.movedim(0, 1).reshape(len(x), -1)[:, : env.vocab])

    return step


@case(ROWS)
def into_one_tensor_cut(env):
    weight = env.shard()

    def step(x):
        whole = torch.cat(gather_into(env, F.linear(x, weight)).chunk(env.mesh.size()), dim=-1)
        return draw(whole[:, : env.vocab].float())

    return step


@case(ROWS)
def into_a_list(env):
    weight = env.shard()

    def step(x):
        padded = F.pad(F.linear(x, weight), (0, env.capacity - env.rows))
        shards = [torch.empty_like(padded) for _ in range(env.mesh.size())]
        dist.all_gather(shards, padded, group=env.mesh.get_group())
        return torch.cat(shards, dim=-1)[:, : env.vocab].argmax(-1)

    return step


# -- operands -------------------------------------------------------------------------------------------------------


@case(ROWS)
def bias_of_the_head(env):
    model = env.model(bias=True)
    return lambda x: draw(model(x))


@case(ROWS, ("V",))
def bias_after(env):
    model = env.model()
    return lambda x, bias: draw(model(x) + bias)


@case(ROWS, (BATCH, "V"))
def mask_after(env):
    model = env.model()
    return lambda x, mask: draw(model(x).masked_fill(mask > 0, -math.inf))


@case(SEQUENCE, ("V",), (BATCH, "V"), (BATCH, 1))
def everything_after(env):
    model = env.model(bias=True, dtype=torch.bfloat16)

    def step(x, bias, mask, temperature):
        logits = model(x.bfloat16())[:, -1].float() + bias
        return torch.multinomial(torch.where(mask > 0, -math.inf, logits / temperature).softmax(-1), 1)

    return step


# -- what must be left alone ----------------------------------------------------------------------------------------


def not_fused(*shapes: tuple, **kwargs: Any) -> Callable:
    return case(*shapes, table=NOT_FUSED, dynamic=False, **kwargs)


@not_fused(ROWS)
def rows_gathered(env):
    weight = torch.randn(env.vocab, FEATURES)
    return lambda x: collectives.all_gather_tensor(F.linear(x, weight), 0, env.mesh).argmax(-1)


@not_fused(SEQUENCE)
def positions_gathered(env):
    weight = torch.randn(env.vocab, FEATURES)
    return lambda x: collectives.all_gather_tensor(F.linear(x, weight), 1, env.mesh).argmax(-1)


@not_fused(ROWS)
def softmax_of_the_shard(env):
    weight = torch.randn(env.capacity, FEATURES)
    return lambda x: draw(collectives.all_gather_tensor(F.linear(x, weight).softmax(-1), 1, env.mesh))


@not_fused(ROWS)
def probabilities_of_the_shard(env):
    weight = torch.randn(env.capacity, FEATURES)
    return lambda x: torch.multinomial(collectives.all_gather_tensor(F.linear(x, weight).softmax(-1), 1, env.mesh), 1)


@not_fused(ROWS)
def two_gathers(env):
    weight = torch.randn(env.capacity, FEATURES)

    def step(x):
        once = collectives.all_gather_tensor(F.linear(x, weight), 1, env.mesh)
        return collectives.all_gather_tensor(once, 1, env.mesh).argmax(-1)

    return step


@not_fused(ROWS)
def another_order(env):
    weight = torch.randn(env.capacity, FEATURES)

    def step(x):
        stacked = collectives.all_gather_tensor(F.linear(x, weight), 0, env.mesh)
        return torch.cat(list(reversed(stacked.split(len(x)))), 1).argmax(-1)

    return step


@not_fused(ROWS)
def another_order_moved(env):
    weight = torch.randn(env.capacity, FEATURES)

    def step(x):
        apart = gather_into(env, F.linear(x, weight[: env.rows])).view(env.mesh.size(), len(x), env.capacity)
        return apart.permute(1, 2, 0).reshape(len(x), -1).argmax(-1)

    return step


@not_fused(ROWS)
def another_order_in_a_list(env):
    weight = torch.randn(env.capacity, FEATURES)

    def step(x):
        local = F.linear(x, weight)
        shards = [torch.empty_like(local) for _ in range(env.mesh.size())]
        dist.all_gather(shards, local, group=env.mesh.get_group())
        return torch.cat(shards[::-1], dim=-1).argmax(-1)

    return step


@not_fused(ROWS)
def a_part_of_each_shard(env):
    weight = torch.randn(env.capacity, FEATURES)
    return lambda x: collectives.all_gather_tensor(F.linear(x, weight)[:, 1:], 1, env.mesh).argmax(-1)


@not_fused(ROWS)
def padding_in_front(env):
    weight = torch.randn(env.capacity, FEATURES)
    return lambda x: collectives.all_gather_tensor(F.pad(F.linear(x, weight), (1, 0)), 1, env.mesh).argmax(-1)


@not_fused(ROWS)
def rows_of_this_rank(env):
    model = env.model()
    share = BATCH // 2
    return lambda x: model(x)[env.rank % 2 * share :][:share].argmax(-1)


@not_fused(ROWS)
def piece_of_this_rank(env):
    model = env.model()
    return lambda x: draw(model(x).chunk(2)[env.rank % 2])


@not_fused(ROWS)
def row_of_this_rank_from_the_end(env):
    model = env.model()
    return lambda x: draw(model(x)[[-2 - env.rank % 2]])


@not_fused(ROWS)
def row_of_this_rank_selected_from_the_end(env):
    model = env.model()
    return lambda x: model(x)[-2 - env.rank % 2].argmax(-1)


@not_fused(ROWS)
def rows_of_this_rank_by_a_constant(env):
    model = env.model()
    return lambda x: draw(model(x).index_select(0, torch.arange(env.rank % 2 + 1, env.rank % 2 + 2)))


@not_fused(ROWS)
def rows_by_a_step_of_this_rank(env):
    model = env.model()
    return lambda x: draw(model(x).index_select(0, torch.arange(0, BATCH, 2 + env.rank % 2)))


@not_fused(ROWS)
def rows_rolled(env):
    model = env.model()
    return lambda x: draw(model(x).roll(1 + env.rank % 2, 0)[-1:])


@not_fused(SEQUENCE)
def position_of_this_rank(env):
    model = env.model()
    return lambda x: draw(model(x)[:, env.rank % 2])


@not_fused(ROWS, options={"tp": False})
def switched_off(env):
    model = env.model()
    return lambda x: draw(model(x))


# -- in a process of its own ----------------------------------------------------------------------------------------

_meshes = SimpleNamespace(world=0, rank=0, flat=None, two=None)


def start(world: int, rank: int) -> None:
    """Join a fake process group of `world` ranks as `rank`; once a process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    _meshes.world, _meshes.rank = world, rank
    _meshes.flat = init_device_mesh("cpu", (world,))
    shape = (1, 2) if world == 2 else (2, world // 2)
    _meshes.two = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["tp"]


def build(name: str, vocab: int) -> tuple[TpCase, Env, Step, list]:
    """The case, its environment on this rank, its step and its inputs."""
    chosen = CASES.get(name) or NOT_FUSED[name]
    env = Env(_meshes.rank, _meshes.world, _meshes.two if chosen.two_dims else _meshes.flat, vocab)
    torch.manual_seed(0)
    return chosen, env, chosen.make(env), chosen.inputs(env)
