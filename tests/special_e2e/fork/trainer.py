"""The loop of the fork: it calls the worker groups itself, and draws until enough groups of responses differ."""

import os
import uuid
from collections import defaultdict
from copy import deepcopy
from pprint import pprint

import numpy as np
import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from verl import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.reward import compute_reward
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import marked_timer
from verl.utils.rollout_skip import RolloutSkip
from verl.utils.tracking import Tracking


class ForkTrainer(RayPPOTrainer):
    """Dynamic sampling in ``fit``."""

    def compute_log_probs(self, batch, metrics, timing):
        """Add the log-probabilities of the old policy and of the reference."""
        batch.batch["response_mask"] = compute_response_mask(batch)
        with marked_timer("old_log_prob", timing, "blue"):
            output = self.actor_rollout_wg.compute_log_prob(batch)
            entropy = agg_loss(
                loss_mat=output.batch["entropys"],
                loss_mask=batch.batch["response_mask"],
                loss_agg_mode=self.config.actor_rollout_ref.actor.loss_agg_mode,
            )
            metrics["actor/entropy"] = entropy.detach().item()
            output.batch.pop("entropys")
            batch = batch.union(output)
        if self.use_reference_policy:
            with marked_timer("ref", timing, "olive"):
                group = self.actor_rollout_wg if self.ref_in_actor else self.ref_policy_wg
                batch = batch.union(group.compute_ref_log_prob(batch))
        return batch

    def add_rewards(self, batch, metrics, timing):
        """Score the responses; returns the batch and the extras of the scorer."""
        with marked_timer("reward", timing, "yellow"):
            if self.use_rm and "rm_scores" not in batch.batch.keys():
                batch = batch.union(self.rm_wg.compute_rm_score(batch))
            scores, extras = compute_reward(batch, self.reward_fn)
            batch.batch["token_level_scores"] = scores
            if extras:
                batch.non_tensor_batch.update({name: np.array(values) for name, values in extras.items()})
            if self.config.algorithm.use_kl_in_reward:
                batch, kl_metrics = apply_kl_penalty(
                    batch, kl_ctrl=self.kl_ctrl_in_reward, kl_penalty=self.config.algorithm.kl_penalty
                )
                metrics.update(kl_metrics)
            else:
                batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        return batch, extras

    def keep_varied_groups(self, batch):
        """Return the rows of prompts whose metric differs between samples, and the number of these prompts."""
        name = self.config.algorithm.filter_groups.metric
        if name == "seq_final_reward":
            batch.non_tensor_batch[name] = batch.batch["token_level_rewards"].sum(dim=-1).numpy()
        elif name == "seq_reward":
            batch.non_tensor_batch[name] = batch.batch["token_level_scores"].sum(dim=-1).numpy()
        values = defaultdict(list)
        for uid, value in zip(batch.non_tensor_batch["uid"], batch.non_tensor_batch[name], strict=True):
            values[uid].append(value)
        kept = {uid for uid, found in values.items() if np.std(found) > 0 or len(found) == 1}
        rows = [row for row, uid in enumerate(batch.non_tensor_batch["uid"]) if uid in kept]
        return batch[rows], len(kept)

    def fit(self):
        """Train to the last step."""
        logger = Tracking(
            project_name=self.config.trainer.project_name,
            experiment_name=self.config.trainer.experiment_name,
            default_backend=self.config.trainer.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        self.global_steps = 0
        self.gen_steps = 0
        self._load_checkpoint()

        if self.val_reward_fn is not None and self.config.trainer.get("val_before_train", True):
            val_metrics = self._validate()
            assert val_metrics, f"{val_metrics=}"
            pprint(f"Initial validation metrics: {val_metrics}")
            logger.log(data=val_metrics, step=self.global_steps)
            if self.config.trainer.get("val_only", False):
                return
        if self.config.actor_rollout_ref.rollout.get("skip_rollout", False):
            RolloutSkip(self.config, self.actor_rollout_wg).wrap_generate_sequences()

        progress_bar = tqdm(total=self.total_training_steps, initial=self.global_steps, desc="Training Progress")
        self.global_steps += 1
        self.gen_steps += 1
        steps = self.config.global_profiler.steps
        was_profiled = False
        is_profiled = self.global_steps in steps if steps is not None else False
        repeats = self.config.actor_rollout_ref.rollout.n
        wanted = self.config.data.train_batch_size
        last_val_metrics = None
        timing = defaultdict(float)
        batch = None
        num_kept = 0
        num_draws = 0
        for _ in range(self.config.trainer.total_epochs):
            for rows in self.train_dataloader:
                metrics = {}
                with marked_timer("start_profile", timing):
                    continuous = self.config.global_profiler.profile_continuous_steps
                    self._start_profiling(not was_profiled and is_profiled if continuous else is_profiled)

                new_batch = DataProto.from_single_dict(rows)
                num_draws += 1
                gen_batch = self._get_gen_batch(new_batch)
                requests = gen_batch.repeat(repeat_times=repeats, interleave=True)
                is_last_step = self.global_steps >= self.total_training_steps

                with marked_timer("step", timing):
                    with marked_timer("gen", timing, "red"):
                        output = self.actor_rollout_wg.generate_sequences(requests)
                        timing.update(output.meta_info["timing"])
                        output.meta_info.pop("timing", None)

                    if self.config.algorithm.adv_estimator == AdvantageEstimator.REMAX:
                        with marked_timer("gen_max", timing, "red"):
                            greedy = deepcopy(gen_batch)
                            greedy.meta_info["do_sample"] = False
                            greedy_output = self.actor_rollout_wg.generate_sequences(greedy)
                            new_batch = new_batch.union(greedy_output)
                            baseline, _ = compute_reward(new_batch, self.reward_fn)
                            new_batch.pop(batch_keys=list(greedy_output.batch.keys()))
                            new_batch.batch["reward_baselines"] = baseline.sum(dim=-1)

                    uids = [str(uuid.uuid4()) for _ in range(len(new_batch.batch))]
                    new_batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
                    new_batch = new_batch.repeat(repeat_times=repeats, interleave=True)
                    new_batch = new_batch.union(output)
                    if self.config.algorithm.use_kl_in_reward:
                        new_batch = self.compute_log_probs(new_batch, metrics, timing)
                    new_batch, extras = self.add_rewards(new_batch, metrics, timing)

                    if not self.config.algorithm.filter_groups.enable:
                        batch = new_batch
                    else:
                        varied, count = self.keep_varied_groups(new_batch)
                        num_kept += count
                        batch = varied if batch is None else DataProto.concat([batch, varied])
                        if num_kept < wanted:
                            limit = self.config.algorithm.filter_groups.max_num_gen_batches
                            if 0 < limit <= num_draws:
                                raise ValueError(f"{num_draws} draws kept {num_kept} prompts: the data may be too hard")
                            print(f"{num_kept} of {wanted} prompts kept: drawing again")
                            self.gen_steps += 1
                            continue
                        batch = batch[: wanted * repeats]

                    if self.config.trainer.balance_batch:
                        self._balance_batch(batch, metrics=metrics)
                    batch.meta_info["global_token_num"] = torch.sum(batch.batch["attention_mask"], dim=-1).tolist()
                    if not self.config.algorithm.use_kl_in_reward:
                        batch = self.compute_log_probs(batch, metrics, timing)
                    if self.use_critic:
                        with marked_timer("values", timing, "cyan"):
                            batch = batch.union(self.critic_wg.compute_values(batch))
                    batch, is_metrics = self.compute_rollout_importance_weights_and_add_to_batch(batch)
                    metrics.update(is_metrics)

                    with marked_timer("adv", timing, "brown"):
                        batch = compute_advantage(
                            batch,
                            adv_estimator=self.config.algorithm.adv_estimator,
                            gamma=self.config.algorithm.gamma,
                            lam=self.config.algorithm.lam,
                            num_repeat=repeats,
                            norm_adv_by_std_in_grpo=self.config.algorithm.get("norm_adv_by_std_in_grpo", True),
                            config=self.config.algorithm,
                        )
                    if self.use_critic:
                        with marked_timer("update_critic", timing, "pink"):
                            critic_output = self.critic_wg.update_critic(batch)
                        metrics.update(reduce_metrics(critic_output.meta_info["metrics"]))
                    if self.config.trainer.critic_warmup <= self.global_steps:
                        with marked_timer("update_actor", timing, "red"):
                            actor_output = self.actor_rollout_wg.update_actor(batch)
                        metrics.update(reduce_metrics(actor_output.meta_info["metrics"]))
                    dump_folder = self.config.trainer.get("rollout_data_dir", None)
                    if dump_folder:
                        self._log_rollout_data(batch, extras, timing, dump_folder)

                if (
                    self.val_reward_fn is not None
                    and self.config.trainer.test_freq > 0
                    and (is_last_step or self.global_steps % self.config.trainer.test_freq == 0)
                ):
                    with marked_timer("testing", timing, "green"):
                        val_metrics = self._validate()
                    if is_last_step:
                        last_val_metrics = val_metrics
                    metrics.update(val_metrics)
                if self.config.trainer.save_freq > 0 and (
                    is_last_step or self.global_steps % self.config.trainer.save_freq == 0
                ):
                    with marked_timer("save_checkpoint", timing, "green"):
                        self._save_checkpoint()

                with marked_timer("stop_profile", timing):
                    next_is_profiled = self.global_steps + 1 in steps if steps is not None else False
                    self._stop_profiling(is_profiled and not next_is_profiled if continuous else is_profiled)
                    was_profiled, is_profiled = is_profiled, next_is_profiled

                metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
                metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing))
                n_gpus = self.resource_pool_manager.get_n_gpus()
                metrics.update(compute_throughout_metrics(batch=batch, timing_raw=timing, n_gpus=n_gpus))
                metrics["train/num_gen_batches"] = num_draws
                timing = defaultdict(float)
                batch = None
                num_kept = 0
                num_draws = 0
                logger.log(data=metrics, step=self.global_steps)

                if is_last_step:
                    pprint(f"Final validation metrics: {last_val_metrics}")
                    progress_bar.close()
                    return
                progress_bar.update(1)
                self.global_steps += 1
                self.gen_steps += 1
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        if not os.path.exists(folder):
            self._save_checkpoint()
