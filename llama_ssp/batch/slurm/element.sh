#!/bin/bash
# Made by llama-ssp @version@.
@options@

# Slurm opens no log in a folder that does not exist, so the script opens it.
logs=@logs@
mkdir -p "$logs" && exec >>"$logs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out" 2>&1 || exit 6
trap 'echo "error: line $LINENO failed with $?: $BASH_COMMAND" >&2; exit 2' ERR
cd -- @here@
@setup@
python=@python@
export PYTHONPATH=@sources@${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1  # no module comes from the folder of the data
@more@

words=(
@words@
)

# The supervisor stops the ranks before the time limit, and requeues the job if work is left.
exec "$python" -m llama_ssp.batch.slurm.supervisor \
    @work@ @signal_s@ \
    srun --kill-on-bad-exit=1@cpus@ "$python" \
    @torchrun@-m llama_ssp "${words[@]}"
