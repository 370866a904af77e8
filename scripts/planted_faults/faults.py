"""Faults as they go wrong in frameworks for reinforcement learning: nothing crashes, and a run trains on wrong numbers.

Each replaces one piece of text, which its file holds exactly once, and names the tests that should fail.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change of one file, the test files or folders that should catch it, and what it means for a run."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    meaning: str


_ADVANTAGE = "verl/algos/advantage.py"
_POLICY_LOSS = "verl/algos/policy_loss.py"

ALGOS = (
    Fault(
        "grpo-mean-of-batch",
        _ADVANTAGE,
        "        advantages = scores - mean[group]\n",
        "        advantages = scores - scores.mean()\n",
        ("tests/algos",),
        "GRPO subtracts the mean of the batch in place of that of the prompt",
    ),
    Fault(
        "rloo-baseline-with-itself",
        _ADVANTAGE,
        "(scores - mean) * torch.where(count > 1, count / (count - 1).clamp(min=1), 1.0)",
        "scores - mean",
        ("tests/algos",),
        "RLOO counts a response in its own baseline",
    ),
    Fault(
        "gae-counts-tool-tokens",
        _ADVANTAGE,
        "lam * rewards), keep, gamma * lam)",
        "lam * rewards), torch.ones_like(keep), gamma * lam)",
        ("tests/algos",),
        "GAE discounts over the tokens of tools",
    ),
    Fault(
        "whiten-over-padding",
        _ADVANTAGE,
        "whitening_mean(torch.where(keep, x, 0.0).sum(dim=-1), count))",
        "whitening_mean(torch.where(keep, x, 0.0).sum(dim=-1), x.numel()))",
        ("tests/algos",),
        "whitening takes the mean over padding too",
    ),
    Fault(
        "clip-sides-swapped",
        _POLICY_LOSS,
        "ratio.clamp(1 - low, 1 + high)\n    loss = torch.maximum(plain, clipped)\n    bound",
        "ratio.clamp(1 - high, 1 + low)\n    loss = torch.maximum(plain, clipped)\n    bound",
        ("tests/algos",),
        "PPO clips below by clip_ratio_high and above by clip_ratio_low",
    ),
    Fault(
        "dual-clip-keeps-gradient",
        _POLICY_LOSS,
        "torch.where(is_bounded, bound, loss), is_clipped",
        "torch.where(is_bounded, bound.detach() + loss - loss.detach(), loss), is_clipped",
        ("tests/algos",),
        "tokens whose loss is bounded by the dual clip still get a gradient",
    ),
    Fault(
        "gspo-mean-over-padding",
        _POLICY_LOSS,
        "mean = inputs.mean_of_response(inputs.log_ratio).detach()",
        "mean = inputs.log_ratio.mean(-1, keepdim=True).detach()",
        ("tests/algos",),
        "GSPO divides the log-ratio of a response by the padded width",
    ),
    Fault(
        "k3-reversed",
        "verl/algos/kl.py",
        "inverse = (-log_ratio).clamp(",
        "inverse = log_ratio.clamp(",
        ("tests/algos",),
        "k3 estimates the KL in the other direction",
    ),
    Fault(
        "k3-plus-without-detach",
        "verl/algos/kl.py",
        'kl_penalty.removesuffix("+")).detach()',
        'kl_penalty.removesuffix("+"))',
        ("tests/algos",),
        "k3+ adds the gradient of k3 to that of k2",
    ),
    Fault(
        "sequence-mean-over-width",
        "verl/algos/aggregate.py",
        "/ lengths.double().clamp(min=1)",
        "/ torch.full_like(lengths, length).double()",
        ("tests/algos",),
        "seq-mean-token-mean divides a response by the width of the batch",
    ),
    Fault(
        "empty-rows-counted",
        "verl/algos/aggregate.py",
        "with_tokens = lengths > 0",
        "with_tokens = lengths >= 0",
        ("tests/algos", "tests/workers/roles/test_losses.py"),
        "rows that only fill the batch count as sequences, so that the loss shrinks",
    ),
    Fault(
        "rollout-ratio-inverted",
        "verl/algos/mismatch.py",
        "return old, old - torch.where(keep, rollout.to(dtype), 0.0), keep",
        "return old, torch.where(keep, rollout.to(dtype), 0.0) - old, keep",
        ("tests/algos", "tests/trainer/ppo/test_rollout_is.py"),
        "rollout importance weights are those of the rollout over the trainer",
    ),
)

PROTOCOL = (
    Fault(
        "repeat-in-other-order",
        "verl/protocol/data_proto.py",
        "rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)",
        "rows.repeat(repeat_times) if interleave else rows.repeat_interleave(repeat_times)",
        ("tests/test_protocol_properties.py", "tests/test_protocol.py"),
        "repeated prompts meet the responses of other prompts",
    ),
    Fault(
        "arrays-not-reordered",
        "verl/protocol/data_proto.py",
        "        self.batch = other.batch\n        self.non_tensor_batch = other.non_tensor_batch\n",
        "        self.batch = other.batch\n        if len(other) != len(self):\n"
        "            self.non_tensor_batch = other.non_tensor_batch\n",
        ("tests/test_protocol_properties.py", "tests/test_protocol.py"),
        "reordering leaves the arrays: a response is scored by the ground truth of another row",
    ),
    Fault(
        "unpad-drops-the-head",
        "verl/protocol/data_proto.py",
        "data.slice(0, len(data) - pad_size)",
        "data.slice(pad_size, len(data))",
        ("tests/test_protocol_properties.py", "tests/test_protocol.py"),
        "unpadding drops rows of the batch and keeps copies",
    ),
    Fault(
        "chunks-lose-rows",
        "verl/protocol/data_proto.py",
        "bounds = [part * base + min(part, larger) for part in range(chunks + 1)]",
        "bounds = [part * base for part in range(chunks + 1)]",
        ("tests/test_protocol_properties.py", "tests/test_protocol.py"),
        "chunks of a batch that does not divide evenly lack its last rows",
    ),
    Fault(
        "shuffle-without-seed",
        "verl/utils/tensordict_utils.py",
        "generator = torch.Generator().manual_seed(seed)",
        "generator = torch.Generator()",
        ("tests/test_protocol.py", "tests/test_protocol_properties.py"),
        "mini-batches have one order, whatever the seed",
    ),
    Fault(
        "lazy-rows-of-other-block",
        "verl/protocol/lazy.py",
        "block = [numbers[id(part.blocks)][part.block] for part in parts]",
        "block = [part.block for part in parts]",
        ("tests/test_lazy.py",),
        "joined columns read their rows from the block of another worker",
    ),
    Fault(
        "collect-first-pipeline-stage",
        "verl/single_controller/base/decorator.py",
        "collected = [rank.tp_rank == 0 and rank.cp_rank == 0 and rank.pp_rank == sizes.pp_size - 1 for rank in ranks]",
        "collected = [rank.tp_rank == 0 and rank.cp_rank == 0 and rank.pp_rank == 0 for rank in ranks]",
        ("tests/single_controller/test_megatron.py", "tests/single_controller/test_decorator.py"),
        "the driver takes the outputs of the first pipeline stage",
    ),
)

ENGINE = (
    Fault(
        "label-shifted",
        "verl/workers/engine/passes.py",
        "reader = _shift_right(place, lead)[:, -width:]",
        "reader = _shift_right(place, lead + 1)[:, -width:]",
        ("tests/workers/roles/test_dp_actor.py", "tests/workers/engine/test_engine_contract.py"),
        "the log-probability of a token is read one position too early",
    ),
    Fault(
        "counts-of-one-rank",
        "verl/workers/engine/passes.py",
        "total = rows.sum(0) / shares.copies",
        "total = row",
        ("tests/workers/roles/test_dp_actor.py", "tests/workers/engine/test_engine_contract.py"),
        "a rank divides its loss by its own tokens in place of those of the mini-batch",
    ),
    Fault(
        "temperature-not-applied",
        "verl/workers/engine/fsdp/forward.py",
        "                    labels,\n                    spec.temperature,\n",
        "                    labels,\n                    1.0,\n",
        ("tests/workers/roles/test_dp_actor.py", "tests/workers/engine/test_engine_contract.py"),
        "old log-probabilities are at temperature 1, whatever that of the rollout",
    ),
    Fault(
        "rows-stay-in-micro-batch-order",
        "verl/workers/engine/base.py",
        "order = torch.tensor(index).argsort()",
        "order = torch.tensor(index)",
        ("tests/workers/roles/test_dp_actor.py", "tests/workers/engine/test_engine_contract.py"),
        "with dynamic batch sizes rows get the log-probabilities of other rows",
    ),
    Fault(
        "norm-of-one-shard",
        "verl/utils/fsdp_utils.py",
        "dist.all_reduce(squared, group=shard_group)",
        "dist.all_reduce(squared.clone(), group=shard_group)",
        ("tests/utils/test_fsdp_utils.py", "tests/workers/engine/test_engine_contract.py"),
        "each rank clips by the norm of its own shard",
    ),
    Fault(
        "context-chunks-not-balanced",
        "verl/models/mcore/packing.py",
        "for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):",
        "for chunk in (2 * cp_rank, 2 * cp_rank + 1):",
        ("tests/workers/engine/test_megatron_packing.py", "tests/workers/engine/test_megatron_contract.py"),
        "a rank holds other chunks of a sequence than Megatron-Core's attention expects",
    ),
    Fault(
        "key-and-value-swapped",
        "verl/models/mcore/weights.py",
        "return [t.reshape(-1, *rest) for t in cut]",
        "return [cut[at].reshape(-1, *rest) for at in (0, 2, 1)]",
        ("tests/models/mcore/test_weights.py",),
        "exported weights have keys and values in each other's place",
    ),
    Fault(
        "label-of-other-rank",
        "verl/utils/megatron/tensor_parallel.py",
        ".squeeze(-1) * mine[chunk]",
        ".squeeze(-1)",
        ("tests/utils/megatron/test_tensor_parallel.py", "tests/workers/engine/test_megatron_contract.py"),
        "ranks that do not hold a label add the logit of another token",
    ),
    Fault(
        "ulysses-loses-first-token",
        "verl/workers/engine/fsdp/forward.py",
        "mine = (packed.keep >= start) & (packed.keep < start + width)",
        "mine = (packed.keep > start) & (packed.keep < start + width)",
        ("tests/workers/engine/test_engine_contract.py", "tests/workers/engine/test_loss_invariance.py"),
        "with sequence parallelism the token at the start of each slice is not trained",
    ),
    Fault(
        "stale-weights-of-other-ranks",
        "verl/workers/engine/megatron/engine.py",
        "        self._weights_are_shards = True\n",
        "        self._weights_are_shards = False\n",
        ("tests/workers/engine/test_megatron_contract.py",),
        "with overlap_param_gather, exported shards of other ranks are those of the step before",
    ),
)

ROLLOUT = (
    Fault(
        "same-seeds-each-step",
        "verl/utils/numerics/seeding.py",
        'derive_seed(run_seed, "validate" if validate else "sample", step)',
        'derive_seed(run_seed, "validate" if validate else "sample")',
        ("tests/utils/numerics/test_seeding.py",),
        "the requests of every step are sampled with the same seeds",
    ),
    Fault(
        "step-keeps-version",
        "verl/workers/engine/base.py",
        "            self._apply_gradients()\n            self.weights_version += 1\n",
        "            self._apply_gradients()\n",
        ("tests/workers/engine/test_fsdp_engine.py", "tests/workers/sharding_manager/test_weight_sync.py"),
        "the rollout is taken for up to date, and samples with stale weights",
    ),
    Fault(
        "end-token-not-trained",
        "verl/workers/rollout/hf_rollout.py",
        "            alive.append(running)\n            running = running & ~torch.isin(token, ends)\n",
        "            running = running & ~torch.isin(token, ends)\n            alive.append(running)\n",
        ("tests/workers/rollout/test_hf_rollout.py", "tests/workers/rollout/test_rollout_contract.py"),
        "responses lack their end token, so that the policy unlearns to stop",
    ),
    Fault(
        "sampled-log-probs-unscaled",
        "verl/workers/rollout/hf_rollout.py",
        "        for process in self._processors:\n            logits = process(seen, logits)\n"
        "        log_probs = logits.log_softmax(dim=-1)\n"
        "        token = logits.argmax(dim=-1) if self._is_greedy else self._draw(log_probs)\n",
        "        log_probs = logits.log_softmax(dim=-1)\n"
        "        for process in self._processors:\n            logits = process(seen, logits)\n"
        "        token = logits.argmax(dim=-1) if self._is_greedy else self._draw(logits.log_softmax(dim=-1))\n",
        ("tests/workers/rollout/test_hf_rollout.py", "tests/workers/rollout/test_rollout_contract.py"),
        "rollout log-probabilities are those before temperature, top_k and top_p",
    ),
    Fault(
        "outputs-sorted-as-text",
        "verl/workers/rollout/vllm_rollout/vllm_rollout.py",
        "finished.sort(key=lambda output: int(output.request_id))",
        "finished.sort(key=lambda output: str(output.request_id))",
        ("tests/workers/rollout/test_rollout_contract.py",),
        "with ten requests or more, responses go to other prompts",
    ),
    Fault(
        "prefix-cache-survives-sync",
        "verl/workers/rollout/vllm_rollout/vllm_rollout.py",
        "        # Requests that are under way compute their keys and values again, with the new weights.\n"
        "        self._llm.reset_prefix_cache(reset_running_requests=True)\n",
        "",
        ("tests/workers/sharding_manager/test_weight_sync.py", "tests/workers/rollout/test_rollout_contract.py"),
        "after a weight sync, prompts are continued from the keys and values of the old weights",
    ),
    Fault(
        "pending-tensors-not-copied",
        "verl/workers/rollout/vllm_rollout/weights.py",
        "bound.arguments[argument] = value.clone()",
        "bound.arguments[argument] = value.view_as(value)",
        ("tests/workers/sharding_manager/test_weight_sync.py", "tests/workers/rollout/test_rollout_contract.py"),
        "tensors that wait for their layer change when the sender reuses their memory",
    ),
    Fault(
        "update-without-pause",
        "verl/workers/rollout/engine_server.py",
        "        await self.pause()\n        await self._ask(self._engine.begin_update()",
        "        await self._ask(self._engine.begin_update()",
        ("tests/workers/rollout/test_server_contract.py",),
        "requests go on while new weights are half loaded",
    ),
)

_AGENT_LOOP = "tests/experimental/agent_loop"

AGENT_LOOPS = (
    Fault(
        "tool-tokens-trained",
        "verl/experimental/agent_loop/trajectory.py",
        "turn = self._append(role, token_ids, seen, 0, [0.0] * len(seen))",
        "turn = self._append(role, token_ids, seen, 1, [0.0] * len(seen))",
        (f"{_AGENT_LOOP}/test_trajectory.py", f"{_AGENT_LOOP}/test_tool_agent_loop.py"),
        "the policy is trained on what tools and users said",
    ),
    Fault(
        "same-seed-each-turn",
        "verl/experimental/agent_loop/trajectory.py",
        'return seed if turn == 0 else derive_seed(seed, "turn", turn)',
        "return seed",
        (f"{_AGENT_LOOP}/test_trajectory.py", f"{_AGENT_LOOP}/test_tool_agent_loop.py"),
        "all turns of a trajectory are sampled with the same random numbers",
    ),
    Fault(
        "tool-results-as-they-come",
        "verl/experimental/agent_loop/tool_agent_loop.py",
        "results = await asyncio.gather(*running)\n",
        "results = [await done for done in asyncio.as_completed(running)]\n",
        (f"{_AGENT_LOOP}/test_tool_agent_loop.py", f"{_AGENT_LOOP}/test_tool_round_trip.py"),
        "a call gets the answer of another call that ended earlier",
    ),
    Fault(
        "tool-text-cut-on-wrong-side",
        "verl/experimental/agent_loop/tool_agent_loop.py",
        'return text[:most] + "...(truncated)"',
        'return text[-most:] + "...(truncated)"',
        (f"{_AGENT_LOOP}/test_tool_agent_loop.py",),
        "tool_response_truncate_side=left keeps the tail of a text",
    ),
    Fault(
        "truth-of-other-row",
        "verl/experimental/agent_loop/rewards.py",
        "requests = together[0].batch.select_idxs([each.index for each in together])",
        "requests = together[0].batch.select_idxs(list(range(len(together))))",
        (f"{_AGENT_LOOP}/test_rewards.py", f"{_AGENT_LOOP}/test_worker.py"),
        "trajectories that end early are scored by the ground truth of the first rows",
    ),
    Fault(
        "score-on-tool-token",
        "verl/experimental/agent_loop/rows.py",
        'tensors["rm_scores"] = at_last_sampled(values, tensors["response_mask"])',
        'tensors["rm_scores"] = at_last_sampled(values, tensors["attention_mask"][:, -width:])',
        (f"{_AGENT_LOOP}/test_worker.py", f"{_AGENT_LOOP}/test_rewards.py"),
        "the score of a response that ends with a tool's answer is on a token that no loss reads",
    ),
    Fault(
        "newest-version-reported",
        "verl/experimental/agent_loop/attempts.py",
        "self.oldest_version = min(found + known, default=None)",
        "self.oldest_version = max(found + known, default=None)",
        (f"{_AGENT_LOOP}/test_pending.py", f"{_AGENT_LOOP}/test_attempts.py"),
        "a row that old weights began counts as sampled by new ones",
    ),
)

_CHECKPOINT = "tests/utils/checkpoint"

CHECKPOINT = (
    Fault(
        "optimizer-not-loaded",
        "verl/utils/checkpoint/fsdp_checkpoint_manager.py",
        '            self.optimizer.load_state_dict(states["optimizer"])\n',
        "",
        (f"{_CHECKPOINT}/test_fsdp_checkpoint_manager.py",),
        "a resumed run starts with fresh moments",
    ),
    Fault(
        "numpy-not-restored",
        "verl/utils/checkpoint/checkpoint_manager.py",
        '        np.random.set_state(rng_state["numpy"])\n',
        "",
        (f"{_CHECKPOINT}/test_fsdp_checkpoint_manager.py",),
        "a resumed run draws other numbers from numpy",
    ),
    Fault(
        "tracker-written-first",
        "verl/trainer/ppo/checkpoint.py",
        "        for role, group in self.groups.items():\n            group.save_checkpoint(",
        "        write_tracker_atomically(self.root, state.step)\n"
        "        for role, group in self.groups.items():\n            group.save_checkpoint(",
        ("tests/trainer/ppo/test_loop_state.py",),
        "a run that dies while it saves cannot be resumed from the checkpoint that its tracker names",
    ),
    Fault(
        "schedule-counted-twice",
        "verl/utils/checkpoint/megatron_checkpoint_manager.py",
        '            vars(self.lr_scheduler)["num_steps"] = 0  # load_state_dict adds the loaded steps\n',
        "",
        (
            "tests/utils/checkpoint/test_megatron_loading.py",
            "tests/utils/checkpoint/test_megatron_checkpoint_manager.py",
        ),
        "loading into a running engine adds the steps of its schedule to those of the checkpoint",
    ),
    Fault(
        "main-weights-not-reloaded",
        "verl/utils/checkpoint/megatron_checkpoint_manager.py",
        "            self.optimizer.reload_model_params()\n",
        "            pass\n",
        (
            "tests/utils/checkpoint/test_megatron_loading.py",
            "tests/utils/checkpoint/test_megatron_checkpoint_manager.py",
        ),
        "the first step after loading weights alone writes the old ones back",
    ),
    Fault(
        "kl-weight-not-restored",
        "verl/trainer/ppo/checkpoint.py",
        '            self.kl_ctrl.load_state_dict(driver["kl_ctrl_in_reward"])\n',
        "            pass\n",
        ("tests/trainer/ppo/test_loop_state.py",),
        "the adaptive KL coefficient of a resumed run starts anew",
    ),
)

DATA_SETS = (
    Fault(
        "first-prompt-token-masked",
        "verl/utils/dataset/rl_dataset.py",
        "attention_mask = (torch.arange(length) >= pad).long()",
        "attention_mask = (torch.arange(length) > pad).long()",
        ("tests/utils/dataset/test_rl_dataset.py",),
        "the model does not see the first token of a prompt",
    ),
    Fault(
        "loss-mask-shifted",
        "verl/utils/dataset/sft_dataset.py",
        "mask = [0] * (len(prompt_ids) - 1) + [1] * len(response_ids) + [0]",
        "mask = [0] * len(prompt_ids) + [1] * len(response_ids)",
        ("tests/utils/dataset/test_sft_datasets.py",),
        "the first token of a response is not trained",
    ),
    Fault(
        "message-mask-ignored",
        "verl/utils/dataset/sft_dataset.py",
        "mask += [int(piece.said if own is None else own)] * len(tokens)",
        "mask += [int(piece.said)] * len(tokens)",
        ("tests/utils/dataset/test_sft_datasets.py",),
        "turns whose own loss_mask is 0 are trained",
    ),
    Fault(
        "same-order-each-epoch",
        "verl/utils/dataset/factory.py",
        "self.sampler.next_epoch = epoch + 1",
        "self.sampler.next_epoch = epoch",
        ("tests/utils/dataset/test_loader_and_factory.py",),
        "every epoch has the order of the first",
    ),
    Fault(
        "rejected-taken-for-chosen",
        "verl/utils/dataset/sft_dataset.py",
        "for key in (prompt_key, chosen_key, rejected_key))",
        "for key in (prompt_key, rejected_key, chosen_key))",
        ("tests/utils/dataset/test_sft_datasets.py",),
        "the reward model learns to prefer the rejected response",
    ),
)

SCORERS = (
    Fault(
        "first-answer-scored",
        "verl/utils/reward_score/gsm8k.py",
        "return numbers[-1] if numbers else None",
        "return numbers[0] if numbers else None",
        ("tests/utils/reward_score/test_math_scorers.py",),
        "a response that corrects itself is scored by its first answer",
    ),
    Fault(
        "errors-count-as-passed",
        "verl/utils/reward_score/code_tests.py",
        "passed = [result is True for result in results]",
        "passed = [bool(result) for result in results]",
        ("tests/utils/reward_score/test_code_scorers.py",),
        "test cases that crash or time out, which have negative codes, count as passed",
    ),
    Fault(
        "wrong-answer-scores-zero",
        "verl/utils/reward_score/math_dapo.py",
        '{"score": 1.0 if correct else -1.0,',
        '{"score": 1.0 if correct else 0.0,',
        ("tests/utils/reward_score/test_math_scorers.py",),
        "DAPO's scores have another scale, which the overlong punishment is added to",
    ),
    Fault(
        "overlong-buffer-after-the-limit",
        "verl/workers/rewards/managers.py",
        "exceeded = sample.length - (self.max_resp_len - buffer)",
        "exceeded = sample.length - self.max_resp_len",
        ("tests/workers/rewards/test_reward_managers.py",),
        "the overlong punishment starts where it should be complete, and so never acts",
    ),
    Fault(
        "containment-reversed",
        "verl/utils/reward_score/search_r1_like_qa_em.py",
        "any(golden and accepts(prediction, golden) for golden in accepted)",
        "any(golden and accepts(golden, prediction) for golden in accepted)",
        ("tests/utils/reward_score",),
        "an answer is right if it is a part of the accepted one",
    ),
)

FAULTS = (*ALGOS, *PROTOCOL, *ENGINE, *ROLLOUT, *AGENT_LOOPS, *CHECKPOINT, *DATA_SETS, *SCORERS)
