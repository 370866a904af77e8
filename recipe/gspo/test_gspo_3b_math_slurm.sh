#!/usr/bin/env bash
# GSPO on Slurm: starts a Ray cluster on the nodes of the job, and runs test_gspo_3b_math.sh on it.
# From the root of the repository, whose environment the nodes share: sbatch [--nodes=N] recipe/gspo/test_gspo_3b_math_slurm.sh [key=value ...]
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#SBATCH --job-name=verl-gspo-3b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
set -euxo pipefail

cd "${SLURM_SUBMIT_DIR:-$PWD}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
RAY_PORT="${RAY_PORT:-6379}"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}")
addresses=$("${on_head[@]}" hostname --all-ip-addresses)
address="${addresses%% *}"

"${on_head[@]}" ray start --head --node-ip-address="$address" --port="$RAY_PORT" --num-gpus="$GPUS_PER_NODE" --block &
until "${on_head[@]}" ray status --address="$address:$RAY_PORT"; do sleep 2; done
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" ray start --address="$address:$RAY_PORT" --num-gpus="$GPUS_PER_NODE" --block &
done

"${on_head[@]}" bash recipe/gspo/test_gspo_3b_math.sh \
    +ray_kwargs.ray_init.address="$address:$RAY_PORT" \
    trainer.n_gpus_per_node="$GPUS_PER_NODE" \
    trainer.nnodes="${#nodes[@]}" \
    "$@"
