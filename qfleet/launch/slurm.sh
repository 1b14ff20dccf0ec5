# Body of every batch script. Slurm runs it as the batch shell on the first node; `srun` starts it again for each task,
# with the argument "task". The run directory and "$job" are on a file system that all nodes share.

# Wait until a child has ended, across signals; returns its exit code.
outlast() {
    local code last
    wait "$1"; code=$?
    while kill -0 "$1" 2> /dev/null; do wait "$1"; code=$?; done
    wait "$1" 2> /dev/null; last=$?
    ((last == 127)) || code=$last  # 127: it was reaped before
    return "$code"
}

# ---- A task ----

# Task 0 receives the stop signal of the batch shell, and the job ends when it ends.
lead() {
    "$@" & local main=$! code
    echo "$main" > "$job/pid"
    [[ ! -e $job/told ]] || kill -USR1 "$main"
    outlast "$main"; code=$?
    rm -f "$job/pid"
    [[ ! -s $job/stopped ]] || read -r code < "$job/stopped"
    conclude "$code"
}

conclude() {
    echo "$1" > "$job/exit"
    ((SLURM_NTASKS == 1)) || scancel --signal=TERM "$SLURM_JOB_ID.$SLURM_STEP_ID"
    return "$1"
}

follow() { [[ $leaving ]] || { "$@" & outlast $!; }; }

train_or_resume() {  # with further arguments
    local words=("${resume[@]}")
    [[ $mode == resume ]] || words=("${train[@]}")
    "$turn" "${qfleet[@]}" "${words[@]}" "$@"
}

# All roles in one process, or in processes of this node.
layout_node() { train_or_resume; }

# Learner, replay and evaluator in the first task, actors in all others.
layout_fleet() {
    local others=$((SLURM_NTASKS - 1)) nth=$SLURM_PROCID
    if ((nth == 0)); then
        train_or_resume --listen "$listen:$port" --token-file "$job/token" --no-local-actors
    else
        follow "${qfleet[@]}" join "$host:$port" --token-file "$job/token" \
            --actors $((actors * nth / others - actors * (nth - 1) / others)) "${join[@]}"
    fi
}

# One torchrun per node, which starts the ranks of that node. Its exit code is 0 or 1 only, so ranks that were signalled
# or misconfigured write theirs to a file.
layout_ranks() {
    local torchrun=("${qfleet[0]}" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$per_node"
        --max-restarts 0 --monitor-interval 0.2 --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID"
        --rdzv-endpoint "$host:$port")
    qfleet=("${torchrun[@]}" "${qfleet[@]:1}")
    export QFLEET_STOPPED=$job/stopped
    train_or_resume
}

# A Ray cluster for this job alone, with its own ports and folders; access requires the token.
layout_ray() {
    local cluster code
    export RAY_ADDRESS=$host:$port RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$job/token
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # Ray is stopped last, so nothing needs draining
    if ((SLURM_PROCID > 0)); then
        until [[ $leaving ]]; do
            ! listens "$host" $((port + 1)) || follow raylet --address="$RAY_ADDRESS"
            sleep 1
        done
        return
    fi
    await_ray --head --node-ip-address="$host" --port="$port" --ray-client-server-port=$((port + 7)) \
        --include-dashboard=false || { conclude $?; return; }
    train_or_resume; code=$?
    kill -TERM "$cluster"; outlast "$cluster"
    return "$code"
}

raylet() {  # with further arguments
    local own=$port
    while listens 127.0.0.1 $((own + 1)); do own=$((own + 10)); done  # another node of the job may be on the same host
    exec "${qfleet[0]}" -m ray.scripts.scripts start "$@" --block --temp-dir="$TMPDIR" --num-cpus=$((per_node * cpus)) \
        --num-gpus="$gpus" --object-store-memory=$((object_store_mb << 20)) --node-manager-port=$((own + 1)) \
        --object-manager-port=$((own + 2)) --metrics-export-port=$((own + 3)) --disable-usage-stats \
        --dashboard-agent-listen-port=$((own + 4)) --dashboard-agent-grpc-port=$((own + 5)) \
        --runtime-env-agent-port=$((own + 6)) &> "$TMPDIR/ray.txt"
}

listens() { (exec 3<> "/dev/tcp/$1/$2") 2> /dev/null; }

# Ray's start times out after 30 s, which is too short on a busy node, so it is retried until $ray_s have passed. Sets
# "$cluster" to its process id; its output is shown if it fails.
await_ray() {  # with further arguments
    local said=$TMPDIR/ray.txt deadline=$((SECONDS + ray_s))
    while ((SECONDS < deadline)); do
        raylet "$@" & cluster=$!
        while kill -0 "$cluster" 2> /dev/null; do
            ! grep -qs "runtime started" "$said" || return 0
            [[ ! $leaving && ! -e $job/told ]] || { kill -TERM "$cluster"; outlast "$cluster"; return 75; }
            sleep 0.2
        done
        [[ ! $leaving ]] || return 75
        echo "$(date +%T) ray did not start on $(hostname), retrying" >&2
        sleep 2
    done
    tail -n 20 "$said" >&2
    echo "error: ray did not start on $(hostname) within $ray_s s: is the node overloaded, or is a port from $port to" \
        "$((port + 9)) taken?" >&2
    return 1
}

task() {
    leaving=
    trap 'leaving=1' TERM  # the job was cancelled: every process was signalled, and task 0 saves before it ends
    trap : USR1 INT
    local base=${TMPDIR:-/tmp}
    ((${#base} <= 20)) || base=/tmp  # the path of a unix socket below it has at most 107 bytes
    export TMPDIR=$base/qf-$SLURM_JOB_ID.$SLURM_PROCID
    rm -rf "$TMPDIR"  # left by an earlier start that was killed
    mkdir -m 700 "$TMPDIR" || exit 1
    trap 'trap "" TERM; rm -rf "$TMPDIR"' EXIT  # Slurm sends TERM again at the end of the job, also to rm
    turn=follow
    ((SLURM_PROCID > 0)) || turn=lead
    "layout_$layout"
    exit
}

# ---- The batch shell ----

# Processes to signal: the command of task 0, or the ranks of torchrun on this node, which stop the others.
main_pids() {
    local pid
    read -r pid < "$job/pid" || return
    if [[ $layout != ranks ]] || ! grep -lsx "PPid:[[:space:]]*$pid" /proc/[0-9]*/status | cut -d / -f 3 | grep .; then
        echo "$pid"
    fi
}

# Slurm sends USR1 shortly before the time limit.
request_stop() {
    local pids
    told=1
    echo "$(date +%T) the time is nearly up: saving"
    touch "$job/told"
    [[ ! -e $job/pid ]] || { mapfile -t pids < <(main_pids); kill -USR1 "${pids[@]}" 2> /dev/null; }
}

begin() {
    rm -f "$job"/{pid,exit,told,stopped,token}
    ((before == 0)) || rm -f "$run/lock"  # Slurm has ended the previous writer, even on another host
    mode=resume
    if ((${#train[@]})) && ! compgen -G "$run/checkpoints/step-*" > /dev/null; then
        mode=train
        ((before == 0)) || [[ ! -e $run ]] || mv "$run" "$run.lost-$before"  # it ended before its first checkpoint
    fi
    (umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$job/token")
    host=127.0.0.1 listen=127.0.0.1
    ((nodes == 1)) || host=$(hostname) listen=0.0.0.0
    port=$((20000 + SLURM_JOB_ID % 1000 * 10))  # ten for each job, below the ephemeral ports
    while listens 127.0.0.1 "$port"; do port=$((port + 10)); done
    export mode host listen port ray_s=${ray_s:-300}
    echo "$(date +%T) job $SLURM_JOB_ID, start $((earlier + 1)): $mode $run"
}

batch() {
    local code earlier=${SLURM_RESTART_COUNT:-0} before=${SLURM_RESTART_COUNT:-0}
    told='' over=''
    trap request_stop USR1
    trap 'told="" over=1; cancelled' TERM INT  # not to be requeued
    while true; do
        begin
        srun --ntasks="$tasks" --ntasks-per-node="$tasks_per_node" --cpus-per-task="$task_cpus" --kill-on-bad-exit=0 \
            bash "$job/job.sh" task &
        outlast $!; code=$?
        [[ ! -s $job/exit ]] || read -r code < "$job/exit"
        rm -f "$job"/{pid,exit,told,stopped,token}
        # A rank was lost: restart all. Torchruns of several nodes count restarts separately, and would not reconnect.
        [[ $layout == ranks && ! $told && ! $over && $code == 1 ]] || break
        ((before < earlier + restarts)) || break
        before=$((before + 1))
    done
    # Signalled at the time limit: requeue unless the run is done (0) or misconfigured (2).
    if [[ $told ]] && ((code != 0 && code != 2)); then
        scontrol requeue "$SLURM_JOB_ID" || echo "the job cannot be requeued; resume with: qfleet submit slurm $run"
    fi
    exit "$code"
}

if [[ ${1-} == task ]]; then task; else batch; fi
