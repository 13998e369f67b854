"""Generators and the models around them: two models in a step, graphs that live on, gradients of gradients."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.loops_common import STEPS, WIDTH, batches, mlp
from benchmarks.loops_door import Door, loop


def ones_and_zeros(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) + F.binary_cross_entropy_with_logits(
        fake, torch.zeros_like(fake)
    )


def pair(door: Door) -> tuple[Any, ...]:
    generator, critic = mlp(outputs=WIDTH, depth=3), mlp(outputs=1, depth=3)
    of_generator = torch.optim.AdamW(generator.parameters(), lr=2e-4)
    of_critic = torch.optim.AdamW(critic.parameters(), lr=2e-4)
    return door.train(generator, of_generator), door.train(critic, of_critic), of_generator, of_critic


@loop
def gan(door: Door) -> None:
    generate, judge, of_generator, of_critic = pair(door)
    for _, (real, _) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            of_critic.zero_grad()
            fake = generate(torch.randn_like(real))
            critic_loss = ones_and_zeros(judge(real), judge(fake.detach()))
            critic_loss.backward()
            of_critic.step()
            of_generator.zero_grad()
            judged = judge(fake)
            loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
            loss.backward()
            of_generator.step()
        door.note(critic_loss, loss)


@loop
def gan_with_two_contexts(door: Door) -> None:
    """The fake of the critic's half is detached, and its graph lives on until the name is bound again."""
    generate, judge, of_generator, of_critic = pair(door)
    for _, (real, _) in zip(door.steps(12), batches(12), strict=True):
        with door:
            of_critic.zero_grad()
            fake = generate(torch.randn_like(real))
            critic_loss = ones_and_zeros(judge(real), judge(fake.detach()))
            critic_loss.backward()
            of_critic.step()
        with door:
            of_generator.zero_grad()
            judged = judge(generate(torch.randn_like(real)))
            loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
            loss.backward()
            of_generator.step()
        door.note(critic_loss, loss)


@loop
def gan_as_one_model(door: Door) -> None:
    """One optimizer over both halves: the loss of the generator runs through a critic whose weights do not learn."""
    generator, critic = mlp(outputs=WIDTH, depth=3), mlp(outputs=1, depth=3)
    optimizer = torch.optim.AdamW([*generator.parameters(), *critic.parameters()], lr=2e-4)
    generate, judge = door.train([generator, critic], optimizer)
    for _, (real, _) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            fake = generate(torch.randn_like(real))
            critic_loss = ones_and_zeros(judge(real), judge(fake.detach()))
            critic_loss.backward()
            critic.requires_grad_(False)
            judged = judge(fake)
            loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
            loss.backward()
            critic.requires_grad_(True)
            optimizer.step()
            optimizer.zero_grad()
        door.note(critic_loss, loss)


@loop
def gradient_penalty(door: Door) -> None:
    """WGAN-GP: five steps of the critic for one of the generator."""
    generate, judge, of_generator, of_critic = pair(door)
    for number, (real, _) in zip(door.steps(14), batches(14), strict=True):
        with door:
            of_critic.zero_grad()
            with torch.no_grad():
                fake = generate(torch.randn_like(real))
            share = torch.rand(len(real), 1)
            mixed = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
            loss = judge(fake).mean() - judge(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            of_critic.step()
            if number % 5 == 4:
                of_generator.zero_grad()
                (-judge(generate(torch.randn_like(real))).mean()).backward()
                of_generator.step()
        door.note(loss)


@loop
def clipped_critic(door: Door) -> None:
    """WGAN with clipped weights and RMSprop."""
    generator, critic = mlp(outputs=WIDTH, depth=3), mlp(outputs=1, depth=3)
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
    judge = door.train(critic, optimizer)
    for _, (real, _) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            with torch.no_grad():
                fake = generator(torch.randn_like(real))
            loss = judge(fake).mean() - judge(real).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.05, 0.05)
        door.note(loss)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(outputs=64, depth=2), mlp(32, WIDTH, depth=2)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(rows).chunk(2, dim=1)
        return mean, log_variance

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encode(rows)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(drawn), mean, log_variance

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        out, mean, log_variance = self(rows)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.mse_loss(out, rows) + 1e-3 * divergence


@loop
def variational_autoencoder(door: Door) -> None:
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    for _, (rows, _) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            out, mean, log_variance = net(rows)
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
            loss = F.mse_loss(out, rows) + 1e-3 * divergence
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def loss_is_a_method(door: Door) -> None:
    """The model is called by another method than forward."""
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    for _, (rows, _) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = net.loss(rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def parts_called_directly(door: Door) -> None:
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    for _, (rows, _) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            mean, _ = net.encode(rows)
            loss = F.mse_loss(net.decoder(mean), rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def diffusion(door: Door) -> None:
    """Predicts noise at random times; sampled from an average of the weights now and then."""
    model = mlp(WIDTH + 1, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    door.also(average)
    for number, (rows, _) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            time, noise = torch.rand(len(rows), 1), torch.randn_like(rows)
            noisy = rows * (1 - time).sqrt() + noise * time.sqrt()
            loss = F.mse_loss(net(torch.cat([noisy, time], 1)), noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.05)
            if number % 4 == 3:
                drawn = torch.randn(8, WIDTH)
                for part in (1.0, 0.5):
                    drawn = drawn - 0.1 * average(torch.cat([drawn, torch.full((8, 1), part)], 1))
                door.note(drawn)
        door.note(loss)


class Coupling(nn.Module):
    def __init__(self, flip: bool):
        super().__init__()
        self.net, self.flip = mlp(WIDTH // 2, WIDTH, depth=1), flip

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = rows.flip(1).chunk(2, 1) if self.flip else rows.chunk(2, 1)
        scale, shift = self.net(first).chunk(2, 1)
        return torch.cat([first, second * scale.tanh().exp() + shift], 1), scale.tanh().sum(1)


@loop
def normalizing_flow(door: Door) -> None:
    model = nn.ModuleList([Coupling(number % 2 == 1) for number in range(4)])
    optimizer = torch.optim.Adam(model.parameters())
    parts = door.train(list(model), optimizer)
    for _, (rows, _) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            total: Any = 0.0
            for part in parts:
                rows, volume = part(rows)
                total = total + volume
            loss = (0.5 * rows.square().sum(1) - total).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def energy_model(door: Door) -> None:
    """Langevin steps in the inputs, by gradients with respect to them, before each update of the weights."""
    model = mlp(outputs=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    net = door.train(model, optimizer)
    for _, (real, _) in zip(door.steps(8), batches(8), strict=True):
        with door:
            drawn = torch.randn_like(real)
            for _ in range(3):
                drawn.requires_grad_()
                (slope,) = torch.autograd.grad(net(drawn).sum(), drawn)
                drawn = (drawn - 0.1 * slope + 0.01 * torch.randn_like(drawn)).detach()
            loss = net(real).mean() - net(drawn).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def straight_through_codes(door: Door) -> None:
    """VQ-VAE with a codebook that moves by averages in a buffer."""
    encoder, decoder = mlp(outputs=32, depth=2), mlp(32, WIDTH, depth=2)
    model = nn.Sequential(encoder, decoder)
    model.register_buffer("codes", torch.randn(16, 32))
    optimizer = torch.optim.Adam(model.parameters())
    encode, decode = door.train([encoder, decoder], optimizer)
    door.also(model)
    for _, (rows, _) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            hidden = encode(rows)
            codes: Any = model.codes
            nearest = torch.cdist(hidden.detach(), codes).argmin(1)
            chosen = codes[nearest]
            loss = F.mse_loss(decode(hidden + (chosen - hidden).detach()), rows) + F.mse_loss(hidden, chosen)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                codes.index_add_(0, nearest, 0.01 * (hidden.detach() - chosen))
        door.note(loss)


@loop
def cycle_with_history(door: Door) -> None:
    """Two generators in one optimizer, images of the past in a list, a critic with its own."""
    there, back, critic = mlp(outputs=WIDTH, depth=2), mlp(outputs=WIDTH, depth=2), mlp(outputs=1, depth=2)
    of_generators = torch.optim.Adam([*there.parameters(), *back.parameters()], lr=2e-4)
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4)
    (go, come), judge = door.train([there, back], of_generators), door.train(critic, of_critic)
    past: list[torch.Tensor] = []
    for _, (rows, _) in zip(door.steps(12), batches(12), strict=True):
        with door:
            fake = go(rows)
            loss = F.l1_loss(come(fake), rows) + (judge(fake) - 1).square().mean()
            of_generators.zero_grad()
            loss.backward()
            of_generators.step()
            past.append(fake.detach())
            past = past[-3:]
            of_critic.zero_grad()
            critic_loss = (judge(rows) - 1).square().mean() + judge(torch.cat(past)).square().mean()
            critic_loss.backward()
            of_critic.step()
        door.note(loss, critic_loss)
