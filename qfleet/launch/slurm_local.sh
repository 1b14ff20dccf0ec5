# Slurm's commands emulated on this machine: tasks as processes, signals to all of them, and requeuing.
: "${SLURM_JOB_ID:=$$}" "${SLURM_RESTART_COUNT:=0}"
export SLURM_JOB_ID SLURM_RESTART_COUNT

srun() {
    local each pids=() code worst=0
    for ((each = 0; each < tasks; each++)); do
        SLURM_STEP_ID=0 SLURM_PROCID=$each SLURM_LOCALID=$each SLURM_NTASKS=$tasks SLURM_CPUS_PER_TASK=$task_cpus \
            setsid bash "$job/job.sh" task & pids+=($!)
    done
    echo "${pids[*]}" > "$job/tasks"
    trap : USR1 TERM INT  # the calling shell forwards them
    for each in "${pids[@]}"; do
        outlast "$each"; code=$?
        ((code <= worst)) || worst=$code
    done
    rm -f "$job/tasks"
    return "$worst"
}

scancel() {
    local pids each
    read -ra pids < "$job/tasks" && for each in "${pids[@]}"; do kill -TERM -- "-$each" 2> /dev/null; done
}

scontrol() { SLURM_RESTART_COUNT=$((SLURM_RESTART_COUNT + 1)) exec bash "$job/job.sh"; }

cancelled() { scancel; }  # a signal to this shell alone stops all tasks
