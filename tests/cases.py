"""The table of cases: a row for each noun of the foundation. tests/test_cases.py fails when a row has no test.

A test claims a row with `@pytest.mark.case("row")`; features of tests/equality/features.py claim rows by their name.
"""

ROWS = {
    # set-up and shape
    "import echelon < 50 ms", "echelon --help < 200 ms", "layers", "pip install and use from outside the clone",
    # echelon run
    "host:rank prefixes", "duplicates collapsed", "per-rank files", "live progress line", "plain lines",
    "two runs in the same second", "Ctrl-C leaves nothing", "SIGKILL of the supervisor leaves nothing", "thread counts",
    "--help", "plain python", "authenticated control plane", "init_process_group over our store", "no pickle",
    # first error last
    "first error last", "exit code of the first failure", "SIGKILL named with memory events", "SIGBUS names /dev/shm",
    "a worker is killed", "exit codes", "out of memory", "nothing left", "coordinator restarts", "the world does not form",
    # loaders
    "map_style", "iterable", "iterable_num_workers", "num_workers", "persistent_workers", "collate_fn", "sampler",
    "batch_sampler", "drop_last", "generators", "worker_init_fn", "batch_size_none", "batch_size_none_map_style",
    "dict_batches", "dataclass_and_nested_batches", "prepare_a_dataset", "several_loaders", "fewer_samples_than_workers",
    "sharded stream",
    # models and gradients
    "gan", "accumulation", "accumulation_by_hand", "accumulation_by_hand_with_a_rest", "micro-batches", "clip_norm",
    "clip_by_value_and_torch_clipping", "bf16 autocast", "fp16 with scaling", "frozen_unused_tied_called_twice",
    "a_layer_used_on_some_workers_only", "sparse_embedding", "torch_compile", "checkpoint_reentrant",
    "checkpoint_not_reentrant", "closure", "lbfgs", "batchnorm_1d_and_scheduler_per_epoch", "ema",
    "batch=per-worker", "warm-up", "biased mean warns", "biased division warns", "biased mean quiet", "first lines",
    "order learned in the first step", "buckets overlap backward", "Group.buffer",
    # public face
    "run.prepare", "run.track", "run.epochs", "run_step", "run.step checks halves", "run.clip_grad_norm",
    "run_mean_over_unequal_counts", "run.mean over a group", "run.log", "run.reduce", "run_gather_in_batch_negatives",
    "run_evaluate", "run.phase", "phase fails", "run.build", "run.save", "run.every", "run.print", "a second init",
    # to see
    "summary", "bytes a step and peak memory, predicted and measured",
    "peak memory with large batches, predicted and measured", "events.jsonl", "TensorBoard", "echelon runs", "echelon status", "echelon logs",
    # compression
    "compress: ratio and error", "compress: properties", "compress: NaN and infinity are seen", "compress: how coded rows meet",
    "compress: same bits on every rank", "compress: error feedback", "compress: zero_grad takes back",
    "compress: an infinite gradient does not stay", "compress: a lost step changes no bit",
    "compress: resumed with the same bits", "compress: converges", "compress: every loop that works without it",
    "compress: at another number of workers",
    # examples
    "example house_prices", "example images", "example language", "example gan", "example parameter_server",
    # stopping and going on
    "--resume gives the same bits", "--resume starts what is not there", "50 moments of SIGTERM", "SIGTERM in the last moment", "SIGTERM in a loop without a loader", "ps,update=async: one worker is plain torch", "ps,update=async: every sample once", "ps,update=bounded: no staleness is sync, bit for bit", "ps,update=async: SIGTERM and --resume", "ps,update=async: a killed worker", "ps,update=async: worker 0 is killed", "ps,backup: late parts are dropped and dealt again", "ps,aggregate: more parts than workers", "ps,backup: a killed worker", "ps,backup: every piece in one update, under delays and kills", "ps,update=async: a push that reached some servers", "ps,backup: SIGTERM and --resume", "ps,backup: kill -9 of the server that decides, and of the other", "ps,backup: the deciding server dies at any moment", "ps,backup: random kills of servers", "ps,backup: a worker is killed together with the server that decides", "ps,update=async: the ledger under kills", "a look never kills", "SIGTERM to all processes at once", "SIGTERM to any process", "SIGTERM at another host", "checkpoint on one worker only", "an iterator left open at the end", "another model is named by its tensor", "the last complete one loads and says so", "a script that goes another way", "USERS 10", "USERS 5", "USERS 6", "a second signal ends at once", "echelon stop saves", "kill -9 and --resume", "no checkpoint within the grace", "saved at 4, loaded at any",
    # checkpoints
    "checkpoint files are safetensors and JSON", "damaged checkpoints are named", "a pickle is refused",
    "a full disk keeps the old checkpoint", "a full disk under the run's folder", "a full disk under run.save of a split model", "checkpoint memory: a share + 10 %",
    "kill -9 around checkpoints", "kill -9 at 200 moments around checkpoints", "checkpoints on a real S3 server", "saved at 4, read at 1, 2, 3, 6, 8", "saved in pieces, read in any others", "a checkpoint of any form loads under any other", "run.save without the model in one memory", "a norm over pieces is the norm", "one rank's failure fails a checkpoint everywhere",
    # stuck and desynchronised
    "stuck: the decision", "stuck: data", "stuck: stopped", "stuck: holds the GIL", "stuck: asleep", "stuck: busy",
    "stuck: different collectives", "stuck: absent", "stuck: no alarm in a phase", "stuck: goes on", "stuck: waits",
    "stuck: exit code 124", "stuck: one call, different values", "stuck: a dead link", "USERS 1",
    # parameter servers as processes of a run
    "ps and servers go together", "servers start, serve and leave with the run", "a server's seat is its own",
    "a killed server is named", "a server that fails is told last", "SIGTERM to a server", "a stopped server is named",
    "servers leave nothing", "servers dealt over hosts", "servers on two hosts", "servers on hosts of their own", "ps in plain python", "ps and --resume",
    "ps,update=local: who goes on after a meeting", "ps,update=local: one worker is plain torch",
    "ps,update=local: a step each and the mean is accumulation", "ps,update=local: copies meet as in a simulation",
    "ps,update=local: every sample once", "ps,update=local: SIGTERM and --resume", "ps,update=local: resumed with the same bits",
    "ps,update=local: a killed worker is named", "ps,update=local: a loop that is left",
    "a killed server on another host", "what is started again takes its old seat", "who speaks for whom",
    # what it must show
    "equality matrix", "twice the same bits", "faults.lose", "replay", "committed ids", "Lost",
    "Group over torch.distributed with our store", "fuzz", "a rank that leaves the loop alone is named",
    # several hosts
    "two hosts", "four hosts, one with IPv6 only", "join before run", "a missing host is named", "wrong token", "wrong script",
    "wrong interface", "loopback told to a remote host", "blocked port", "a failure on another host is told last",
    "a worker of another host is killed", "a further host's supervisor is killed", "USERS 17 on several hosts",
    "a host vanishes", "USERS 3 on several hosts", "USERS 12 on several hosts", "torchrun as the starter",
    "workers dealt over hosts", "hosts in order", "USERS 8",
    # the native core and torch's backend
    "one contract for every Group", "DDP, FSDP2, tensor parallel and pipelining over our backend",
    "a dead rank raises under our backend", "a lost operation in our run completes with zeros",
    "torch's own suite over our backend", "Group over shared memory", "every kernel has a twin", "threads change no bit",
    "TCP: bounded memory, tags in any order", "TCP: mismatched calls name both sides", "TCP: strangers are dropped without harm",
    "TCP: garbage in an open stream",     "TCP: sums in rank order, whatever the way", "a link is cut in mid-operation", "a rank dies among hosts",
    "random operations among hosts", "random operations, kills and cancels", "a wheel holds the package and the core, nothing else",
    "no memory to share",
    # the parameter server
    "ps: placement", "ps: shares load every link alike", "ps: how updates meet", "ps: the staleness bound is never broken",
    "ps: backup drops exactly the late ones", "ps: the ledger is complete", "ps: nobody starves", "ps: a step is never torn",
    "ps: NaN verdict and clip factor are global", "ps: staleness statistics",
    "nonfinite: the decision", "nonfinite: skipped as by hand", "nonfinite: refused by name", "nonfinite: never torn", "nonfinite: seen",
    "ps: what servers did is seen",
    "ps: optimizers equal torch's",
    "ps: one contract for every link", "ps: back-pressure instead of memory growth", "ps: a forked child has no links",
    "echelon serve", "ps: servers reached from another host", "ps: garbage harms nobody", "ps: a client that stops holds up nobody", "ps: kill -9 of a client or a server in mid-call",
    "ps: the direct API equals torch's optimizers", "ps: a pull sees whole updates", "ps: wrong names and shapes are told to who caused them",
    "equality matrix with parameter servers", "every loop with parameter servers, or told why not", "ps: a lost step changes no bit",
    "ps: the same answer while servers are killed", "ps: kill -9 of a server with a copy", "ps: 50 random kills of servers and workers in one run", "ps: both copies gone at once",
    "ps: a copy takes over, and never less than was acknowledged",
    "ps: a checkpoint loads without servers, and the reverse", "ps: .grad of apply=server is never silently a part",
    "ps: values arrive behind the next forward", "ps: whoever reads a parameter gets its new values",
    "ps: where values cannot be hidden, step() waits", "ps: values that never come lose the next step",
    "ps: sums in the order of ranks", "ps: a server's step is the sum's step", "ps: a push is provisional", "ps: norms are those of the sum",
    "ps: what is missing is named", "ps: workers that step differently are told", "ps: a worker that goes is told to those who wait",
    "ps: garbage of a worker is told to it alone", "ps: a server's state loads at any number of servers",
    "ps: two optimizers over one range keep states apart", "a worker killed among servers is named",
    "USERS 2", "USERS 4", "USERS 7", "USERS 13", "USERS 17", "USERS 18", "USERS 19", "USERS 20", "USERS 24", "USERS 25",
    # a killed worker is started again
    "again: the decision", "again: groups that change", "again: the state is handed over", "again: no bit is changed",
    "again: killed on its way back", "again: an exception ends the run", "again: killed before the first batch", "again: killed before anybody met it",
    "again: between two steps of one iteration", "ps: a lost iteration of several steps leaves no trace", "again: nobody left", "again: evaluate and save", "again: on another host", "again: a storm",
    # layers shared by workers
    "tensor: the plan", "tensor: overrides", "tensor: refusals", "tensor: layers", "tensor: proofs", "tensor: a weight used elsewhere",
    "tensor: clipping", "tensor: equality", "tensor: a lost step changes no bit", "tensor: run.step", "tensor: memory",
    "tensor: saved whole",
    "tensor: parallel cross-entropy", "tensor: logits that are read are gathered",
    "plan: what would be done", "plan: what is refused",
    # columns of a table on several workers
    "vertical: who has what", "vertical: who keeps what", "vertical: equality", "vertical: only parts and gradients cross",
    "vertical: other rows are noticed", "vertical: a lost step changes no bit", "vertical: what is refused says why",
    "vertical: shuffled by the run, saved and resumed as anywhere", "vertical: a killed worker", "example vertical",
    # sharded
    "sharded: equality matrix", "sharded: loops", "sharded: a lost step changes no bit", "sharded: memory", "sharded: bytes a step, predicted", "sharded: no pickle",
    "sharded: which modules are units", "sharded: who owns what", "sharded: where rows lie", "sharded: level 1",
    "sharded: level 1 beside a pipeline", "sharded: levels 2 and 3 in a pipeline", "sharded: levels 2 and 3 over a tensor axis",
    "sharded: saved under one form, loaded under another", "sharded: parts of stages and of pieces, saved and loaded", "sharded: an update that is not finite", "sharded: offload", "sharded: a killed worker", "sharded: what is refused says why",
    # models that do not fit one worker
    "pipeline: stages are the whole model", "pipeline: changing lengths", "pipeline: control flow over numbers is refused",
    "pipeline: the cut", "pipeline: random forwards at every cut", "pipeline: layers are measured",
    # models that one worker cannot hold
    "run.build: start weights bit-equal", "run.build: parts under sharded, tensor and pipeline",
    "run.build: nothing is allocated",
    "too large: plain data parallel names the shortfall and what would fit", "too large: what is needed and what fits",
    "too large: an allocation that fails is told what takes less",
    "too large: sharded trains within the memory that was predicted",
    "tensor: with a pipeline",
    # pipelines: lists of actions, and going through them
    "pipeline: schedules are whole and cannot deadlock", "pipeline: the bubble, predicted",
    "pipeline: micro-batches dealt to unequal workers", "pipeline: every schedule equals one process",
    "pipeline: values that skip stages", "pipeline: over shared memory", "pipeline: a lost peer unwinds",
    "pipeline: a message that is not due is an error with both sides", "pipeline: garbage in messages", "split models: a worker killed, stopped or asked to stop",
    "pipeline: trained, evaluated, saved and resumed as anywhere", "equality of pipelines", "equality of pipelines with parameter servers", "lost steps of pipelines", "pipeline: a plain loop is told what to write",
    # models that one worker cannot hold

    # models that do not fit one worker

}  # fmt: skip
