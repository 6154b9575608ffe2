"""Train a small character model: blocks of Kimi Delta Attention and a top-k mixture of experts.

    python examples/train_tiny_lm.py                  # short run, about a minute on two idle CPU cores
    python examples/train_tiny_lm.py --steps 400      # longer
    python examples/train_tiny_lm.py --compile        # torch.compile, one graph for forward and backward each
    python examples/train_tiny_lm.py --cuda-graphs    # forward and backward captured once and replayed (needs a GPU)

The text is examples/data/keepers_log.txt, the log of an imaginary lighthouse, composed for this example. Prints the
first and last loss and tokens per second, and draws the loss curve.

A seed gives the same curve in every mode, but for rounding: on the CPU (fp32) eager and --compile stay within 0.001
of each other over the first 40 steps; on a GPU (bf16) eager and --cuda-graphs are equal, --compile is within 0.05.
The tests hold them to it. Later the curves may part further: a rounding that changes an expert's choice changes
everything after it.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import culax

TEXT = Path(__file__).parent / "data" / "keepers_log.txt"


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of the run; lengths in characters."""

    steps: int = 100
    seed: int = 0
    batch: int = 8
    length: int = 128
    width: int = 128
    blocks: int = 2
    heads: int = 2
    head_dim: int = 64
    experts: int = 8
    chosen: int = 2
    expert_width: int = 128
    learning_rate: float = 4e-3


class DeltaAttention(nn.Module):
    """Kimi Delta Attention with a short causal convolution before it and an output gate after it."""

    def __init__(self, settings: Settings) -> None:
        """Projections for q, k, v, the decay gate, beta and the output gate."""
        super().__init__()
        width, self.heads, self.head_dim = settings.width, settings.heads, settings.head_dim
        inner = self.heads * self.head_dim
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.conv = nn.Conv1d(3 * inner, 3 * inner, kernel_size=4, groups=3 * inner, padding=3, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.beta = nn.Linear(width, self.heads, bias=False)
        self.out_gate = nn.Linear(width, inner, bias=False)
        self.norm = nn.RMSNorm(self.head_dim)
        self.out = nn.Linear(inner, width, bias=False)
        # Decays between about exp(-0.001) and exp(-1.6) a character: heads and channels start with different memories.
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        step = torch.empty(inner).uniform_(-7, -2.3).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to [B, T, width]."""
        batch, length, _ = x.shape
        qkv = self.conv(self.qkv(x).transpose(1, 2))[..., :length]
        q, k, v = F.silu(qkv).transpose(1, 2).reshape(batch, length, 3, self.heads, self.head_dim).unbind(2)
        o, _ = culax.chunk_kda(
            q,
            k,
            v,
            self.gate(x).view(batch, length, self.heads, self.head_dim),
            self.beta(x),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
        )
        return self.out(self.norm(o).flatten(2) * torch.sigmoid(self.out_gate(x)))


class MixtureOfExperts(nn.Module):
    """Each token goes to its best `chosen` experts; shapes depend on nothing the router says, so a graph can hold
    it."""

    def __init__(self, settings: Settings) -> None:
        """A router and two grouped layers."""
        super().__init__()
        self.experts, self.chosen = settings.experts, settings.chosen
        self.router = nn.Linear(settings.width, settings.experts, bias=False)
        self.up = culax.GroupedLinear(settings.experts, settings.width, 2 * settings.expert_width)
        self.down = culax.GroupedLinear(settings.experts, settings.expert_width, settings.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, width] to the same and the load-balancing loss (1 when all experts get the same share)."""
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).float().softmax(-1)
        weights, experts = probabilities.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)

        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = (flat[:, None] == torch.arange(self.experts, device=x.device)).sum(0)
        offs = counts.cumsum(0).to(torch.int32)
        rows = tokens[:, None].expand(-1, self.chosen, -1).flatten(0, 1)[order]
        hidden, gate = self.up(rows, offs).chunk(2, dim=-1)
        rows = self.down(F.silu(gate) * hidden, offs)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        mixed = (rows[back].view(-1, self.chosen, tokens.shape[1]) * weights[..., None].to(rows.dtype)).sum(1)

        balance = self.experts * (counts / flat.numel() * probabilities.mean(0)).sum()
        return mixed.view_as(x), balance


class TinyLM(nn.Module):
    """Characters in, the training loss out."""

    def __init__(self, vocabulary: int, settings: Settings) -> None:
        """Embedding, blocks of attention and experts, and a head."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, settings.width)
        self.attention = nn.ModuleList(DeltaAttention(settings) for _ in range(settings.blocks))
        self.experts = nn.ModuleList(MixtureOfExperts(settings) for _ in range(settings.blocks))
        self.norms = nn.ModuleList(nn.RMSNorm(settings.width) for _ in range(2 * settings.blocks + 1))
        self.head = nn.Linear(settings.width, vocabulary, bias=False)

    def forward(self, characters: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T+1] character numbers to (loss to minimise, cross-entropy in nats a character)."""
        x = self.embedding(characters[:, :-1])
        balance = x.new_zeros(())
        for position, (attention, experts) in enumerate(zip(self.attention, self.experts)):
            x = x + attention(self.norms[2 * position](x))
            mixed, share = experts(self.norms[2 * position + 1](x))
            x, balance = x + mixed, balance + share
        logits = self.head(self.norms[-1](x)).float()
        entropy = F.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten())
        return entropy + 0.01 * balance, entropy


def load_text() -> tuple[Tensor, int]:
    """The text as character numbers, and how many different characters it has."""
    text = TEXT.read_text()
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]), len(numbers)


def learning_rate(settings: Settings, step: int) -> float:
    """Warm up over 10 steps, then fall to a tenth."""
    progress = step / max(1, settings.steps - 1)
    return settings.learning_rate * min(1.0, (step + 1) / 10) * (1 - 0.9 * progress)


def gradient_step(model: TinyLM, mode: str, example: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that leaves the gradients of one batch in the parameters and returns the cross-entropy.

    mode is "eager", "compile" or "cuda-graphs"; `example` is a batch on the model's device.
    """
    forward = torch.compile(model, fullgraph=True) if mode == "compile" else model
    device = example.device.type

    def eager(characters: Tensor) -> Tensor:
        model.zero_grad(set_to_none=False)
        # The cast weights must be part of what a graph records, so they aren't cached across calls.
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            loss, entropy = forward(characters)
        loss.backward()
        return entropy.detach()

    if mode != "cuda-graphs":
        return eager
    batch = example.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            eager(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        entropy = eager(batch)

    def replay(characters: Tensor) -> Tensor:
        batch.copy_(characters)
        graph.replay()
        return entropy.clone()

    return replay


def train(
    settings: Settings, device: str, mode: str, report: Callable[[int, float, float], None] | None = None
) -> tuple[list[float], float]:
    """Train from scratch; returns the cross-entropy of every step (nats a character) and tokens per second.

    `report(step, loss, tokens_per_second)` is called about ten times. The first step, which compiles or captures, isn't
    timed.
    """
    torch.manual_seed(settings.seed)
    text, vocabulary = load_text()
    model = TinyLM(vocabulary, settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    draws = torch.Generator().manual_seed(settings.seed)

    def batch() -> Tensor:
        starts = torch.randint(len(text) - settings.length, (settings.batch, 1), generator=draws)
        return text[starts + torch.arange(settings.length + 1)].to(device)

    batches = [batch() for _ in range(settings.steps)]
    step_gradients = gradient_step(model, mode, batches[0])
    losses: list[Tensor] = []
    begun = time.perf_counter()
    for step, characters in enumerate(batches):
        losses.append(step_gradients(characters))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        if step == 0:
            losses[0].item()
            begun = time.perf_counter()
        if report is not None and (step % max(1, settings.steps // 10) == 0 or step == settings.steps - 1):
            loss = losses[-1].item()
            report(step, loss, rate(settings, step, begun))
    return torch.stack(losses).tolist(), rate(settings, settings.steps - 1, begun)


def rate(settings: Settings, steps: int, begun: float) -> float:
    """Tokens per second of the timed steps."""
    return steps * settings.batch * settings.length / (time.perf_counter() - begun)


def draw(losses: list[float], title: str, path: Path) -> str:
    """Draw the curve as PNG; returns a line saying where, or why not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is missing (pip install 'culax[plots]')"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(losses, color="tab:blue")
    axes.set(xlabel="step", ylabel="cross-entropy (nats a character)", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return f"loss plot: {path}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a small character model of KDA blocks and a mixture of experts."
    )
    parser.add_argument("--steps", type=int, default=Settings.steps, help="batches to train on (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches (default %(default)s)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help="default: cuda where there is one")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--compile", dest="mode", action="store_const", const="compile", default="eager", help="torch.compile the step"
    )
    modes.add_argument(
        "--cuda-graphs", dest="mode", action="store_const", const="cuda-graphs", help="capture the step once and replay"
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("build/train_tiny_lm.png"), help="PNG to write (default %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps: expected at least 2, got {arguments.steps}")
    if arguments.mode == "cuda-graphs" and arguments.device != "cuda":
        parser.error("--cuda-graphs needs a CUDA device")
    return arguments


def main() -> None:
    """Train, show progress, print the outcome, draw the curve."""
    arguments = parse()
    settings = Settings(steps=arguments.steps, seed=arguments.seed)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{arguments.device} {arguments.mode}", total=settings.steps, state="first step")

        def report(step: int, loss: float, tokens_per_second: float) -> None:
            state = f"step {step + 1}/{settings.steps}  loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
            progress.update(task, completed=step + 1, state=state)

        losses, tokens_per_second = train(settings, arguments.device, arguments.mode, report)
    tail = losses[-10:]
    last = sum(tail) / len(tail)
    console.print(
        f"loss {losses[0]:.3f} -> {last:.3f} (mean of the last {len(tail)} steps), {tokens_per_second:,.0f} tokens/s"
    )
    console.print(draw(losses, f"tiny KDA + MoE, {arguments.device}, {arguments.mode}", arguments.plot))


if __name__ == "__main__":
    main()
