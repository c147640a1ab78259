#!/usr/bin/env python3
"""PyTorch programs whose sizes or kernels depend on values, for dry runs: graphs, sparse gradients, solvers, detection, decoding.

    python crates/cli/proof/other_programs.py graph_network '{}'

A program prints one line of JSON, as those of `programs.py` do.
"""

import json
import sys

import torch
from programs import KEPT, figures, llama_model, trained
from torch import nn
from torch.nn import functional

GPU = "cuda"


def optimized(net, rate=1e-3):
    """Keeps a module and its optimizer, and returns both."""
    net = net.to(GPU)
    optimizer = torch.optim.Adam(net.parameters(), rate)
    KEPT.extend((net, optimizer))
    return net, optimizer


class Attention(nn.Module):
    """A layer of a graph attention network: a softmax over the edges of each node."""

    def __init__(self, size, heads=8):
        super().__init__()
        self.heads, self.inner = heads, nn.Linear(size, size)
        self.weights = nn.Parameter(torch.randn(2, heads, size // heads) / 8)

    def forward(self, nodes, edges):
        is_loop = edges[0] == edges[1]
        edges = edges[:, ~is_loop]
        loops = torch.arange(len(nodes), device=GPU)
        source, target = torch.cat([edges, torch.stack([loops, loops])], 1)
        inner = self.inner(nodes).view(len(nodes), self.heads, -1)
        score = functional.leaky_relu((inner[source] * self.weights[0] + inner[target] * self.weights[1]).sum(-1)).exp()
        total = torch.zeros(len(nodes), self.heads, device=GPU).index_add(0, target, score)
        messages = inner[source] * (score / total[target])[..., None]
        return torch.zeros_like(inner).index_add(0, target, messages).flatten(1)


def graph_network(nodes=50_000, edges=600_000, size=64):
    net, optimizer = optimized(nn.ModuleList(Attention(size) for _ in range(3)))
    features, labels = torch.randn(nodes, size, device=GPU), torch.randint(size, (nodes,), device=GPU)
    pairs = torch.randint(nodes, (2, edges), device=GPU)

    def loss(_):
        found = features
        for layer in net:
            found = functional.elu(layer(found, pairs))
        return functional.cross_entropy(found, labels)

    trained(optimizer, 3, loss)


def recommender(items=1_000_000, size=64, batch=2_048):
    bag = nn.EmbeddingBag(items, size, mode="sum", sparse=True).to(GPU)
    net, optimizer = optimized(nn.Sequential(nn.Linear(size, 512), nn.ReLU(), nn.Linear(512, 1)))
    sparse = torch.optim.SparseAdam(bag.parameters())
    KEPT.extend((bag, sparse))
    for _ in range(3):
        items_of = torch.randint(items, (batch, 20), device=GPU)
        net(bag(items_of)).square().mean().backward()
        for each in (sparse, optimizer):
            each.step()
            each.zero_grad()


def solvers():
    signal = torch.fft.ifft2(torch.fft.fft2(torch.randn(64, 1024, 1024, device=GPU))).real
    batch = torch.randn(16, 512, 512, device=GPU)
    torch.linalg.svd(batch)
    positive = batch @ batch.mT + 512 * torch.eye(512, device=GPU)
    factor = torch.linalg.cholesky(positive)
    torch.cholesky_solve(signal[:16, :512, :8].contiguous(), factor)
    torch.linalg.eigh(positive)
    torch.linalg.lstsq(batch, batch[..., :4])
    torch.linalg.solve(positive, batch)
    large = torch.linalg.matrix_power(torch.eye(2048, device=GPU), 2) * 2048
    for matrix in (positive, positive[0], large):
        for name in ("inv", "slogdet", "qr", "lu", "lu_factor", "eigvalsh", "pinv"):
            getattr(torch.linalg, name)(matrix)


def chosen(count=40_000_000):
    """Sizes that depend on values: those above a limit, unique ones, and the largest."""
    values = torch.randn(count, device=GPU)
    large = values[values > 1]
    torch.unique((large * 100).long())
    where = torch.nonzero(values > 2)
    parts = values.masked_select(values < -1)
    torch.topk(parts, min(len(parts), 1_000_000))
    torch.repeat_interleave(torch.arange(1000, device=GPU), torch.randint(1, 2000, (1000,), device=GPU))
    return {"rows": len(where)}


def sparse(size=200_000):
    at = torch.randint(size, (2, 3_000_000), device=GPU)
    matrix = torch.sparse_coo_tensor(at, torch.randn(at.shape[1], device=GPU), (size, size)).coalesce()
    net, optimizer = optimized(nn.Linear(64, 64))
    dense = torch.randn(size, 64, device=GPU)
    trained(optimizer, 2, lambda _: net(torch.sparse.mm(matrix, dense)).square().mean())
    return {"values": matrix._nnz(), "rows": matrix.to_sparse_csr().crow_indices().numel()}


def experts(tokens=16_384, size=1_024, count=8):
    router, optimizer = optimized(nn.Linear(size, count))
    net, second = optimized(nn.ModuleList(nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)) for _ in range(count)))

    def loss(_):
        words = torch.randn(tokens, size, device=GPU)
        weights, experts = router(words).softmax(-1).topk(2)
        out = torch.zeros_like(words)
        for number, expert in enumerate(net):
            rows, nth = torch.where(experts == number)
            out = out.index_add(0, rows, expert(words[rows]) * weights[rows, nth, None])
        return out.square().mean()

    def update(found):
        found.backward()
        optimizer.step()
        second.step()
        second.zero_grad()

    trained(optimizer, 3, loss, update)


def detection():
    from torchvision.models import detection as models

    net, optimizer = optimized(models.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=20))
    images = [torch.rand(3, 600, 800, device=GPU) for _ in range(2)]
    boxes = torch.tensor([[10.0, 20.0, 200.0, 300.0], [50.0, 60.0, 400.0, 500.0]], device=GPU)
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2], device=GPU)} for _ in images]
    trained(optimizer, 2, lambda _: sum(net(images, targets).values()))
    net.eval()
    with torch.no_grad():
        net(images)


def segmentation():
    from torchvision.models import segmentation as models

    net, optimizer = optimized(models.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21))
    images, labels = torch.rand(4, 3, 512, 512, device=GPU), torch.randint(21, (4, 512, 512), device=GPU)
    trained(optimizer, 3, lambda _: functional.cross_entropy(net(images)["out"], labels))


def adversarial(size=64):
    def up(inputs, outputs):
        return [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]

    def down(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 4, 2, 1), nn.LeakyReLU(0.2)]

    maker, first = optimized(nn.Sequential(nn.ConvTranspose2d(100, 1024, 4), *up(1024, 512), *up(512, 256), *up(256, 128), *up(128, 3)))
    judge, second = optimized(nn.Sequential(*down(3, 128), *down(128, 256), *down(256, 512), *down(512, 1024), nn.Conv2d(1024, 1, 4)))
    for _ in range(3):
        made, real = maker(torch.randn(256, 100, 1, 1, device=GPU)), torch.randn(256, 3, size, size, device=GPU)
        (functional.softplus(-judge(real)).mean() + functional.softplus(judge(made.detach())).mean()).backward()
        second.step()
        second.zero_grad()
        functional.softplus(-judge(made)).mean().backward()
        first.step()
        for each in (first, second):
            each.zero_grad()


def beams():
    net = llama_model().to(GPU).half().eval()
    KEPT.append(net)
    with torch.no_grad():
        words = net.generate(torch.ones(4, 32, dtype=torch.long, device=GPU), max_new_tokens=64, num_beams=4, do_sample=False, eos_token_id=31_999, pad_token_id=0)
    return {"length": words.shape[1]}


def speculative():
    net, draft = llama_model().to(GPU).half().eval(), llama_model(layers=2).to(GPU).half().eval()
    KEPT.extend((net, draft))
    with torch.no_grad():
        words = net.generate(torch.ones(1, 32, dtype=torch.long, device=GPU), max_new_tokens=48, assistant_model=draft, do_sample=False, eos_token_id=31_999, pad_token_id=0)
    return {"length": words.shape[1]}


def ragged():
    net, optimizer = optimized(nn.LSTM(512, 1_024, 2, batch_first=True))
    lengths = torch.randint(50, 400, (64,), generator=torch.Generator().manual_seed(1))

    def loss(_):
        rows = [torch.randn(int(length), 512, device=GPU) for length in lengths]
        out, _ = net(nn.utils.rnn.pack_sequence(rows, enforce_sorted=False))
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return padded.square().mean() + torch.nested.to_padded_tensor(nested, 0.0).mean()

    trained(optimizer, 3, loss)


if __name__ == "__main__":
    torch.manual_seed(1)
    facts = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    torch.cuda.synchronize()
    print(json.dumps({**figures(), **(facts or {})}), flush=True)
