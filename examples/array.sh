#!/bin/bash
# A job array in which each task trains one run of RUNS on its own node; %2 allows two tasks at a time.
#   snakemake --profile profiles/local data      # once, on the login node: plan, and tokenize the shared data
#   sbatch examples/array.sh
# The cluster file of the runs has `executor: local` and the sizes of one node. Before the time limit, Slurm sends
# SIGTERM to the task's step: the training saves and stops. Submit the array again, and each run continues.
#SBATCH --array=0-5%2
#SBATCH --nodes=1 --gpus-per-node=4 --cpus-per-task=32 --mem=400G
#SBATCH --time=12:00:00 --signal=TERM@300
RUNS=(rates-lr1e-5-s1 rates-lr1e-5-s2 rates-lr1e-5-s3 rates-lr2e-5-s1 rates-lr2e-5-s2 rates-lr2e-5-s3)
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" snakemake --profile profiles/local "runs/${RUNS[SLURM_ARRAY_TASK_ID]}/report.html"
