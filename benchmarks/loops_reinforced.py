"""Reinforcement learning and preferences: target networks, replay buffers, old policies, rewards."""

import copy
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from benchmarks.loops_common import WIDTH, mlp
from benchmarks.loops_door import Door, loop

ACTIONS = 6


def world(states: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next states and rewards of a world that is a rotation."""
    moved = torch.roll(states, 1, 1) * 0.9 + 0.01 * actions.float().view(-1, 1)
    return moved, moved.mean(1) - 0.1 * actions.float().view(-1)


@loop
def deep_q(door: Door) -> None:
    """DQN: a replay buffer that grows, and a target network by load_state_dict."""
    model = mlp(outputs=ACTIONS)
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    door.also(target)
    memory: deque[Any] = deque(maxlen=600)
    states = torch.randn(48, WIDTH)
    for number in door.steps(16):
        with torch.no_grad():
            actions = model(states).argmax(1)
        actions = torch.where(torch.rand(48) < 0.2, torch.randint(0, ACTIONS, (48,)), actions)
        after, rewards = world(states, actions)
        memory.extend(zip(states, actions, rewards, after, strict=True))
        states = after
        picked = [memory[at] for at in torch.randint(0, len(memory), (128,))]
        before, taken, gained, then = (torch.stack(parts) for parts in zip(*picked, strict=True))
        with door:
            with torch.no_grad():
                goal = gained + 0.9 * target(then).max(1).values
            loss = F.smooth_l1_loss(net(before).gather(1, taken[:, None])[:, 0], goal)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
        if number % 4 == 3:
            target.load_state_dict(model.state_dict())
        door.note(loss)


@loop
def double_q_in_a_tensor_buffer(door: Door) -> None:
    """The buffer is one tensor that is filled in place; the target follows softly."""
    model, optimizer_class = mlp(outputs=ACTIONS), torch.optim.AdamW
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = optimizer_class(model.parameters())
    net = door.train(model, optimizer)
    door.also(target)
    buffer, at = torch.zeros(1024, WIDTH), 0
    for _ in door.steps(12):
        buffer[at : at + 64] = torch.randn(64, WIDTH)
        at += 64
        rows = buffer[torch.randint(0, at, (128,))]
        with door:
            with torch.no_grad():
                actions = net(rows).argmax(1, keepdim=True)
                goal = 0.1 + 0.9 * target(torch.roll(rows, 1, 1)).gather(1, actions)
            loss = F.mse_loss(net(rows).gather(1, actions), goal)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mine, theirs in zip(target.parameters(), model.parameters(), strict=True):
                    mine.data.mul_(0.95).add_(theirs.data, alpha=0.05)
        door.note(loss)


@loop
def reinforce(door: Door) -> None:
    """Graphs of a whole episode are kept in a list until its end."""
    model = mlp(outputs=ACTIONS, depth=2)
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    for _ in door.steps(10):
        with door:
            states, logs, rewards = torch.randn(32, WIDTH), [], []
            for _ in range(5):
                policy = Categorical(logits=net(states))
                actions = policy.sample()
                logs.append(policy.log_prob(actions))
                states, reward = world(states, actions)
                rewards.append(reward)
            returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
            loss = -(torch.stack(logs) * (returns - returns.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        door.note(loss)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = mlp(outputs=WIDTH, depth=2), nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(states)
        return self.actor(hidden), self.critic(hidden)[:, 0]

    def act(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, value = self(states)
        policy = Categorical(logits=logits)
        actions = policy.sample()
        return actions, policy.log_prob(actions), value


@loop
def proximal_policy(door: Door) -> None:
    """PPO: rollouts without gradients, then epochs of shuffled mini-batches."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-5)
    net = door.train(model, optimizer)
    for _ in door.steps(6):
        states = torch.randn(64, WIDTH)
        kept: list[Any] = []
        with torch.no_grad():
            for _ in range(4):
                actions, logs, values = model.act(states)
                after, rewards = world(states, actions)
                kept.append((states, actions, logs, values, rewards))
                states = after
        all_states, all_actions, all_logs, all_values, all_rewards = (torch.cat(p) for p in zip(*kept, strict=True))
        advantages = all_rewards - all_values
        for _ in range(2):
            for rows in torch.randperm(256).split(128):
                with door:
                    logits, values = net(all_states[rows])
                    policy = Categorical(logits=logits)
                    ratio = (policy.log_prob(all_actions[rows]) - all_logs[rows]).exp()
                    gain = torch.min(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows])
                    loss = -gain.mean() + F.mse_loss(values, all_rewards[rows]) - 0.01 * policy.entropy().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                door.note(loss)


@loop
def soft_actor_critic(door: Door) -> None:
    """SAC: an actor, two critics with targets, and a temperature that is learnt, each with its optimizer."""
    actor, critics = mlp(outputs=8, depth=2), nn.ModuleList([mlp(WIDTH + 4, 1, depth=2) for _ in range(2)])
    targets = copy.deepcopy(critics).requires_grad_(False)
    temperature = nn.Parameter(torch.zeros(()))
    of_actor, of_critics = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critics.parameters())
    of_temperature = torch.optim.Adam([temperature], lr=1e-2)
    act, judges = door.train(actor, of_actor), door.train(list(critics), of_critics)
    door.also(targets, temperature)

    def draw(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_scale = act(states).chunk(2, 1)
        policy = Normal(mean, log_scale.clamp(-5, 2).exp())
        raw = policy.rsample()
        return raw.tanh(), (policy.log_prob(raw) - (1 - raw.tanh().square() + 1e-6).log()).sum(1, keepdim=True)

    for _ in door.steps(10):
        states = torch.randn(128, WIDTH)
        with door:
            with torch.no_grad():
                after = torch.roll(states, 1, 1)
                actions, logs = draw(after)
                joined = torch.cat([after, actions], 1)
                goal = states.mean(1, keepdim=True) + 0.9 * (
                    torch.min(targets[0](joined), targets[1](joined)) - temperature.exp() * logs
                )
            joined = torch.cat([states, torch.rand(128, 4)], 1)
            critic_loss = sum(F.mse_loss(judge(joined), goal) for judge in judges)
            of_critics.zero_grad()
            critic_loss.backward()
            of_critics.step()
            actions, logs = draw(states)
            joined = torch.cat([states, actions], 1)
            loss = (temperature.exp().detach() * logs - torch.min(judges[0](joined), judges[1](joined))).mean()
            of_actor.zero_grad()
            loss.backward()
            of_actor.step()
            of_temperature.zero_grad()
            (-temperature * (logs.detach() - 4).mean()).backward()
            of_temperature.step()
            with torch.no_grad():
                for mine, theirs in zip(targets.parameters(), critics.parameters(), strict=True):
                    mine.lerp_(theirs, 0.05)
        door.note(critic_loss, loss)


@loop
def deterministic_policy(door: Door) -> None:
    """DDPG: the actor's loss runs through a critic whose gradients are thrown away."""
    actor, critic = mlp(outputs=4, depth=2), mlp(WIDTH + 4, 1, depth=2)
    of_actor, of_critic = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
    act, judge = door.train(actor, of_actor), door.train(critic, of_critic)
    for number in door.steps(12):
        states = torch.randn(128, WIDTH)
        with door:
            joined = torch.cat([states, torch.rand(128, 4)], 1)
            critic_loss = F.mse_loss(judge(joined), states.mean(1, keepdim=True))
            of_critic.zero_grad()
            critic_loss.backward()
            of_critic.step()
            door.note(critic_loss)
            if number % 2:
                loss = -judge(torch.cat([states, act(states).tanh()], 1)).mean()
                of_actor.zero_grad()
                loss.backward()
                of_actor.step()
                door.note(loss)


class Writer(nn.Module):
    """A language model in small: embeddings, a GRU, and a head."""

    def __init__(self, words: int = 200, width: int = 96):
        super().__init__()
        self.words, self.mixer, self.head = nn.Embedding(words, width), nn.GRU(width, width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixer(self.words(tokens))[0])


def log_probability(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:-1]).log_softmax(-1)
    return logits.gather(-1, tokens[1:, :, None])[..., 0].sum(0)


@loop
def direct_preferences(door: Door) -> None:
    """DPO with a frozen copy as reference."""
    model = Writer()
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    net = door.train(model, optimizer)
    for _ in door.steps(10):
        better, worse = torch.randint(0, 200, (16, 24)), torch.randint(0, 200, (16, 24))
        with door:
            with torch.no_grad():
                base = log_probability(reference, better) - log_probability(reference, worse)
            margin = log_probability(net, better) - log_probability(net, worse)
            loss = -F.logsigmoid(0.1 * (margin - base)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def reference_without_adapter(door: Door) -> None:
    """DPO with adapters: the reference is the model itself with its adapters switched off."""
    base = Writer().requires_grad_(False)
    adapter = nn.Sequential(nn.Linear(96, 8, bias=False), nn.Linear(8, 200, bias=False))
    nn.init.zeros_(adapter[1].weight)
    switch = {"on": True}
    model = nn.ModuleDict({"base": base, "adapter": adapter})

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = base.mixer(base.words(tokens))[0]
            return base.head(hidden) + adapter(hidden) if switch["on"] else base.head(hidden)

    whole = Adapted()
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    net = door.train(whole, optimizer)
    for _ in door.steps(10):
        better, worse = torch.randint(0, 200, (16, 24)), torch.randint(0, 200, (16, 24))
        with door:
            switch["on"] = False
            with torch.no_grad():
                apart = log_probability(net, better) - log_probability(net, worse)
            switch["on"] = True
            loss = -F.logsigmoid(0.1 * (log_probability(net, better) - log_probability(net, worse) - apart)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def group_relative_policy(door: Door) -> None:
    """GRPO: answers are drawn token by token from the model that learns, then scored against their group."""
    model = Writer(50)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    net = door.train(model, optimizer)
    for _ in door.steps(6):
        tokens = torch.randint(0, 50, (2, 16))
        with torch.no_grad():
            for _ in range(6):
                drawn = Categorical(logits=model(tokens)[-1]).sample()
                tokens = torch.cat([tokens, drawn[None]])
        rewards = (tokens % 2).float().mean(0)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        with torch.no_grad():
            old = log_probability(model, tokens)
        for _ in range(2):
            with door:
                logs = log_probability(net, tokens)
                with torch.no_grad():
                    theirs = log_probability(reference, tokens)
                apart = (theirs - logs).exp() - (theirs - logs) - 1
                loss = (-(logs - old).exp() * advantages + 0.04 * apart).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            door.note(loss)


@loop
def reward_model(door: Door) -> None:
    """Pairs in one batch, of a shape that changes from step to step."""
    model = nn.Sequential(nn.EmbeddingBag(500, WIDTH), mlp(outputs=1, depth=2))
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    for number in door.steps(12):
        tokens = torch.randint(0, 500, (32, 10 + number % 3))
        with door:
            scores = net(torch.cat([tokens, tokens.flip(1)]))[:, 0]
            loss = -F.logsigmoid(scores[:32] - scores[32:]).mean() + 0.01 * scores.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def curiosity(door: Door) -> None:
    """Random network distillation: the reward is the error of a net that learns a frozen one."""
    model, frozen = ActorCritic(), mlp(outputs=32, depth=2).requires_grad_(False)
    guess = mlp(outputs=32, depth=2)
    whole = nn.ModuleList([model, guess])
    optimizer = torch.optim.Adam(whole.parameters())
    net, predict = door.train([model, guess], optimizer)
    mean, count = torch.zeros(()), 0
    for _ in door.steps(10):
        states = torch.randn(96, WIDTH)
        with door:
            error = (predict(states) - frozen(states)).square().mean(1)
            count += 1
            mean += (error.detach().mean() - mean) / count
            logits, values = net(states)
            actions = Categorical(logits=logits).sample()
            advantage = (error.detach() / (mean + 1e-8)) - values
            gain = logits.log_softmax(1).gather(1, actions[:, None])[:, 0] * advantage.detach()
            loss = -gain.mean() + advantage.square().mean() + error.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)
