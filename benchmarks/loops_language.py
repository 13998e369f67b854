"""Sequences: language models, recurrent nets over long texts, adapters, sparse embeddings, retrieval."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.loops_common import STEPS, job
from benchmarks.loops_door import Door, loop

WORDS, LENGTH, SIZE = 200, 32, 96


class Block(nn.Module):
    def __init__(self, size: int = SIZE):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(size), nn.MultiheadAttention(size, 4, batch_first=True)
        self.rest = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.rest(x)


class Gpt(nn.Module):
    def __init__(self, *, depth: int = 2, is_tied: bool = False, is_checkpointed: bool = False, dropout: float = 0.0):
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, SIZE), nn.ModuleList([Block() for _ in range(depth)])
        self.drop, self.norm, self.head = nn.Dropout(dropout), nn.LayerNorm(SIZE), nn.Linear(SIZE, WORDS, bias=False)
        self.is_checkpointed = is_checkpointed
        if is_tied:
            self.head.weight = self.words.weight

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.words(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, number: int) -> torch.Tensor:
        for _ in range(number):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def texts(number: int = STEPS, rows: int = 12, length: int = LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, WORDS, (rows, length), generator=generator) for _ in range(number)]


def next_word(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def train(door: Door, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    net = door.train(model, optimizer)
    for number in door.steps(len(data)):
        with door:
            loss = next_word(net, data[number])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop(job=job(adamw, Gpt, next_word, texts, clip_norm=1.0))
def language_model(door: Door) -> None:
    model = Gpt()
    train(door, model, adamw(model.parameters()), texts())


@loop(job=job(adamw, lambda: Gpt(is_tied=True), next_word, texts, clip_norm=1.0))
def tied_weights(door: Door) -> None:
    model = Gpt(is_tied=True)
    train(door, model, adamw(model.parameters()), texts())


@loop(job=job(adamw, lambda: Gpt(is_checkpointed=True), next_word, texts, clip_norm=1.0))
def checkpointed_blocks(door: Door) -> None:
    model = Gpt(is_checkpointed=True)
    train(door, model, adamw(model.parameters()), texts())


@loop
def checkpointed_with_dropout(door: Door) -> None:
    model = Gpt(is_checkpointed=True, dropout=0.1)
    train(door, model, adamw(model.parameters()), texts())


@loop
def reentrant_checkpoints(door: Door) -> None:
    class Reentrant(Gpt):
        def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.norm(x)

    model = Reentrant()
    train(door, model, adamw(model.parameters()), texts())


@loop
def longer_texts_later(door: Door) -> None:
    model = Gpt()
    data = [part[:, : 8 + 4 * (number // 2)] for number, part in enumerate(texts(14))]
    train(door, model, adamw(model.parameters()), data)


@loop
def generates_while_training(door: Door) -> None:
    model = Gpt()
    optimizer = adamw(model.parameters())
    net = door.train(model, optimizer)
    for number, tokens in zip(door.steps(STEPS), texts(), strict=True):
        with door:
            loss = next_word(net, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % 3 == 1:
            model.eval()
            door.note(model.generate(tokens[:2, :4], 4))
            model.train()
        door.note(loss)


@loop
def distillation(door: Door) -> None:
    """A teacher in no_grad, a student, temperatures, and hidden states that are matched through a projection."""
    teacher, student = Gpt(depth=3).eval().requires_grad_(False), Gpt(depth=1)
    project = nn.Linear(SIZE, SIZE)
    whole = nn.ModuleList([student, project])
    optimizer = adamw(whole.parameters())
    door.train(whole, optimizer)
    for _, tokens in zip(door.steps(STEPS), texts(), strict=True):
        with door:
            with torch.no_grad():
                hidden_of_teacher = teacher.hidden(tokens)
                soft = teacher.head(hidden_of_teacher).div(2).log_softmax(-1)
            hidden = student.hidden(tokens)
            logits = student.head(hidden)
            loss = F.kl_div(logits.div(2).log_softmax(-1), soft, log_target=True, reduction="batchmean")
            loss = loss + F.mse_loss(project(hidden), hidden_of_teacher)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


class Adapter(nn.Module):
    """LoRA around a linear layer."""

    def __init__(self, layer: nn.Linear, rank: int = 4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


@loop
def adapters(door: Door) -> None:
    model = Gpt().requires_grad_(False)
    for block in model.blocks:
        block.rest[1], block.rest[3] = Adapter(block.rest[1]), Adapter(block.rest[3])  # type: ignore[index, operator]
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
    train(door, model, optimizer, texts())


@loop
def adapters_merged_midway(door: Door) -> None:
    model = Gpt().requires_grad_(False)
    for block in model.blocks:
        block.rest[1] = Adapter(block.rest[1])  # type: ignore[index, operator]
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
    net = door.train(model, optimizer)
    for number, tokens in zip(door.steps(STEPS), texts(), strict=True):
        if number == 5:
            with torch.no_grad():
                for block in model.blocks:
                    adapter: Any = block.rest[1]  # type: ignore[index]
                    adapter.layer.weight += adapter.up @ adapter.down
                    adapter.up.zero_()
        with door:
            loss = next_word(net, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.mixer, self.head = nn.Embedding(WORDS, SIZE), nn.LSTM(SIZE, SIZE), nn.Linear(SIZE, WORDS)

    def forward(self, tokens: torch.Tensor, state: Any = None) -> Any:
        out, state = self.mixer(self.words(tokens), state)
        return self.head(out), state


@loop
def truncated_backward(door: Door) -> None:
    """TBPTT: the state of one part is detached and goes on into the next."""
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    net = door.train(model, optimizer)
    state: Any = None
    for _, tokens in zip(door.steps(STEPS), texts(), strict=True):
        state = None if state is None else tuple(part.detach() for part in state)
        with door:
            logits, state = net(tokens[:, :-1].T, state)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].T.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def backward_through_two_parts(door: Door) -> None:
    """TBPTT with an overlap: the graph of one part is kept, and backward runs through two of them."""
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    net = door.train(model, optimizer)
    for _, tokens in zip(door.steps(8), texts(8), strict=True):
        with door:
            first, second = tokens.T.chunk(2)
            logits, state = net(first[:-1])
            loss = F.cross_entropy(logits.flatten(0, 1), first[1:].flatten())
            loss.backward(retain_graph=True)
            more, _ = net(second[:-1], state)
            rest = F.cross_entropy(more.flatten(0, 1), second[1:].flatten())
            rest.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss, rest)


@loop
def packed_sequences(door: Door) -> None:
    model = Recurrent()
    optimizer = adamw(model.parameters())
    door.train(model, optimizer)
    for number, tokens in zip(door.steps(STEPS), texts(), strict=True):
        lengths = torch.tensor([LENGTH - (number + at) % 9 for at in range(len(tokens))])
        with door:
            packed = nn.utils.rnn.pack_padded_sequence(
                model.words(tokens), lengths, batch_first=True, enforce_sorted=False
            )
            out, _ = nn.utils.rnn.pad_packed_sequence(model.mixer(packed)[0], batch_first=True)
            logits = model.head(out)[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1 : logits.shape[1] + 1].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


class Bag(nn.Module):
    def __init__(self, *, is_sparse: bool = True, rows: int = 2000):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(rows, 64, sparse=is_sparse, mode="sum"), nn.Linear(64, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


def bag_data() -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randint(0, 2000, (64, 12), generator=generator), torch.randint(0, 10, (64,), generator=generator))
        for _ in range(STEPS)
    ]


def bag_loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@loop(job=job(lambda parameters: torch.optim.SGD(parameters, lr=0.1), Bag, bag_loss, bag_data))
def sparse_embeddings_sgd(door: Door) -> None:
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), bag_data(), strict=True):
        with door:
            loss = bag_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def sparse_embeddings_sparse_adam(door: Door) -> None:
    model = Bag()
    of_table = torch.optim.SparseAdam(model.table.parameters())
    of_head = torch.optim.Adam(model.head.parameters())
    net = door.train(model, of_table)
    door.also(of_head)
    for _, batch in zip(door.steps(STEPS), bag_data(), strict=True):
        with door:
            loss = bag_loss(net, batch)
            loss.backward()
            for optimizer in (of_table, of_head):
                optimizer.step()
                optimizer.zero_grad()
        door.note(loss)


@loop(job=job(lambda parameters: torch.optim.Adagrad(parameters, lr=0.1), Bag, bag_loss, bag_data))
def sparse_embeddings_adagrad(door: Door) -> None:
    model = Bag()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), bag_data(), strict=True):
        with door:
            loss = bag_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def skip_gram(door: Door) -> None:
    """word2vec: two sparse tables, negative samples, one SparseAdam."""
    here, there = nn.Embedding(3000, 64, sparse=True), nn.Embedding(3000, 64, sparse=True)
    optimizer = torch.optim.SparseAdam([*here.parameters(), *there.parameters()], lr=1e-2)
    of_here, of_there = door.train([here, there], optimizer)
    for _ in door.steps(STEPS):
        words, near, far = torch.randint(0, 3000, (3, 256))
        with door:
            own = of_here(words)
            loss = -(F.logsigmoid((own * of_there(near)).sum(1)) + F.logsigmoid(-(own * of_there(far)).sum(1))).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def graph_convolution(door: Door) -> None:
    """Products with an adjacency in COO form, over the whole graph."""
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(0, 300, (2, 2000), generator=generator)
    adjacency = torch.sparse_coo_tensor(edges, torch.full((2000,), 0.1), (300, 300)).coalesce()

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 10)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(adjacency, self.second(F.relu(torch.sparse.mm(adjacency, self.first(rows)))))

    model = Convolution()
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    rows, labels = torch.randn(300, 128, generator=generator), torch.randint(0, 10, (300,), generator=generator)
    for _ in door.steps(STEPS):
        with door:
            loss = F.cross_entropy(net(rows), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def jagged_batches(door: Door) -> None:
    """Nested tensors in jagged layout through linear layers and attention."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(3)])
            self.out = nn.Linear(SIZE, SIZE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [part.unflatten(-1, [4, SIZE // 4]).transpose(1, 2) for part in (map_(x) for map_ in self.maps)]
            return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2))

    model = Attends()
    optimizer = adamw(model.parameters())
    net = door.train(model, optimizer)
    generator = torch.Generator().manual_seed(9)
    for number in door.steps(8):
        rows = [torch.randn(8 + (number + at) % 5, SIZE, generator=generator) for at in range(8)]
        with door:
            batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
            loss = net(batch).values().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def gradient_cache(door: Door) -> None:
    """GradCache: embeddings without gradients, gradients of the loss in them, then chunk after chunk with gradients."""
    query, document = nn.EmbeddingBag(WORDS, SIZE), nn.EmbeddingBag(WORDS, SIZE)
    query, document = (nn.Sequential(part, nn.Linear(SIZE, SIZE), nn.Tanh()) for part in (query, document))  # type: ignore[assignment]
    whole = nn.ModuleList([query, document])
    optimizer = adamw(whole.parameters())
    nets = door.train([query, document], optimizer)
    for _ in door.steps(8):
        sides = [torch.randint(0, WORDS, (96, 16)).split(24) for _ in range(2)]
        with door:
            with torch.no_grad():
                cached = [
                    torch.cat([net(part) for part in parts]).requires_grad_()
                    for net, parts in zip(nets, sides, strict=True)
                ]
            loss = F.cross_entropy(cached[0] @ cached[1].T, torch.arange(96))
            loss.backward()
            for net, parts, whole_side in zip(nets, sides, cached, strict=True):
                assert whole_side.grad is not None
                for part, gradient in zip(parts, whole_side.grad.split(24), strict=True):
                    torch.dot(net(part).flatten(), gradient.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def hard_negatives_from_an_index(door: Door) -> None:
    """An index of all documents is made anew every few steps with the weights of then, and kept."""
    model = nn.Sequential(nn.EmbeddingBag(WORDS, SIZE), nn.Linear(SIZE, SIZE))
    optimizer = adamw(model.parameters())
    net = door.train(model, optimizer)
    documents = torch.randint(0, WORDS, (400, 8))
    index = torch.zeros(0)
    for number in door.steps(12):
        if number % 4 == 0:
            with torch.no_grad():
                index = model(documents)
        questions = torch.randint(0, 400, (48,))
        with door:
            own = net(documents[questions].flip(1))
            with torch.no_grad():
                hard = (own @ index.T).topk(4, dim=1).indices[:, 3]
            loss = F.triplet_margin_loss(own, net(documents[questions]), net(documents[hard]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def masked_words(door: Door) -> None:
    """Only the masked places go through the head: another shape at each step."""
    model = Gpt()
    optimizer = adamw(model.parameters())
    door.train(model, optimizer)
    for _, tokens in zip(door.steps(12), texts(12), strict=True):
        mask = torch.rand(tokens.shape) < 0.15
        with door:
            hidden = model.hidden(tokens.masked_fill(mask, 0))
            loss = F.cross_entropy(model.head(hidden[mask]), tokens[mask])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def loss_in_chunks(door: Door) -> None:
    """The head and its loss run chunk by chunk, each with its own backward into a detached hidden state."""
    model = Gpt()
    optimizer = adamw(model.parameters())
    door.train(model, optimizer)
    for _, tokens in zip(door.steps(STEPS), texts(), strict=True):
        with door:
            hidden = model.hidden(tokens[:, :-1])
            cut = hidden.detach().requires_grad_()
            total = 0.0
            for rows, words in zip(cut.flatten(0, 1).chunk(4), tokens[:, 1:].flatten().chunk(4), strict=True):
                loss = F.cross_entropy(model.head(rows), words) / 4
                loss.backward()
                total += loss.item()
            hidden.backward(cut.grad)
            optimizer.step()
            optimizer.zero_grad()
        door.note(total)


@loop
def experts(door: Door) -> None:
    """A mixture of experts: rows are sorted to their expert, some experts get none."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.gate, self.head = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, 6), nn.Linear(SIZE, WORDS)
            self.experts = nn.ModuleList(
                [nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE)) for _ in range(6)]
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens).flatten(0, 1)
            weight, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            return self.head(x + out).view(*tokens.shape, WORDS)

    model = Experts()
    train(door, model, adamw(model.parameters()), texts())


@loop
def loss_scaled_by_tokens_of_all_parts(door: Door) -> None:
    """Accumulation as transformers does it: all parts are counted first, every loss is a sum over that count."""
    model = Gpt()
    optimizer = adamw(model.parameters())
    net = door.train(model, optimizer)
    data = texts(3 * 8)
    for number in door.steps(8):
        parts = [tokens[:, : LENGTH - 5 * at] for at, tokens in enumerate(data[3 * number : 3 * number + 3])]
        count = sum(part[:, 1:].numel() for part in parts)
        for at, part in enumerate(parts):
            with door:
                loss = F.cross_entropy(net(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="sum") / count
                loss.backward()
                if at == 2:
                    optimizer.step()
                    optimizer.zero_grad()
            door.note(loss)


@loop
def layers_frozen_at_random(door: Door) -> None:
    """LISA: another block learns every few steps; the others are frozen and their states dropped."""
    model = Gpt(depth=3)
    optimizer = adamw(model.parameters())
    net = door.train(model, optimizer)
    generator = torch.Generator().manual_seed(4)
    for number, tokens in zip(door.steps(12), texts(12), strict=True):
        if number % 3 == 0:
            chosen = int(torch.randint(0, 3, (), generator=generator))
            for at, block in enumerate(model.blocks):
                block.requires_grad_(at == chosen)
                if at != chosen:
                    for parameter in block.parameters():
                        optimizer.state.pop(parameter, None)
                        parameter.grad = None
        with door:
            loss = next_word(net, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def soup_of_checkpoints(door: Door) -> None:
    model = Gpt(depth=1)
    optimizer = adamw(model.parameters())
    net = door.train(model, optimizer)
    kept: list[Any] = []
    for number, tokens in zip(door.steps(12), texts(12), strict=True):
        with door:
            loss = next_word(net, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % 4 == 3:
            kept.append(copy.deepcopy({name: value.detach() for name, value in model.named_parameters()}))
        door.note(loss)
    model.load_state_dict({n: torch.stack([part[n] for part in kept]).mean(0) for n in kept[0]}, strict=False)
