"""The part of an exported script that trains: model and batches, step, checkpoints, loop."""

from __future__ import annotations

from string import Template

from claw_plan.executor.export_model import ModelText
from claw_plan.executor.export_wrapping import averages, is_sharded, uses_ddp
from claw_plan.executor.opened_plan import device_type_of
from claw_plan.planner.plan import Plan


def model_text(plan: Plan, text: ModelText) -> str:
    """Building the model, its batches and its loss."""
    batches = _FILE_BATCHES if text.trains_on_file else _RANDOM_BATCHES
    return Template(_MODEL + batches).substitute(
        BUILD=text.build, BATCH=text.batch, CALL=text.call, LOSS=text.loss
    )


def optimizer_text(plan: Plan, text: ModelText) -> str:
    """The optimizer of one model or stage."""
    if text.optimizer is not None:
        made = text.optimizer
    else:
        name = {"adamw": "AdamW", "sgd": "SGD"}[plan.training.optimizer]
        # Fused calls do not take divided and whole parameters together.
        foreach = ", foreach=False" if plan.knobs().tp > 1 else ""
        made = f"torch.optim.{name}(parameters, lr=LEARNING_RATE{foreach})"
    return f'''
def make_optimizer(model):
    """Updates this rank's parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return {made}
'''


def step_text(plan: Plan, *, ties: bool) -> str:
    """One optimizer step."""
    return _pipeline_step(plan, ties=ties) if plan.knobs().pp > 1 else _plain_step(plan)


def _plain_step(plan: Plan) -> str:
    knobs = plan.knobs()
    before, context = [], ""
    if is_sharded(plan) and knobs.zero < 3:
        before += [
            "        # Gathered parameters are freed after the last backward only.",
            "        model.set_is_last_backward(is_last)",
            "        model.set_reshard_after_backward(is_last)",
        ]
    if is_sharded(plan) and knobs.zero == 1:
        before += [
            "        # Gradients add up whole and are scattered once.",
            "        model.set_requires_gradient_sync(is_last)",
        ]
    if is_sharded(plan) and knobs.dp_replicate > 1:
        before += [
            "        # Replicas of the shards meet once a step.",
            "        model.set_requires_all_reduce(is_last)",
        ]
    if uses_ddp(plan):
        context = "contextlib.nullcontext() if is_last else model.no_sync()"
    body = [
        "loss = loss_of(model, microbatch) / len(microbatches)",
        "loss.backward()  # gradients of all microbatches add up to those of their mean",
    ]
    if context:
        lines = [f"        with {context}:  # replicas meet once a step"]
        lines += [f"            {line}" for line in body]
    else:
        lines = [f"        {line}" for line in body]
    needs_last = bool(before or context)
    clip_norm = plan.training.clip_norm
    before_step = _AVERAGE if averages(plan) else ""
    after = "    average_over_replicas(model.parameters(), mesh)\n" if averages(plan) else ""
    if clip_norm is not None:
        before_step += _CLIP.replace("CLIP_NORM", f"{clip_norm}")
        after += "    clip_gradients(model.parameters())\n"
    return before_step + Template(_PLAIN_STEP).substitute(
        MESH=", mesh" if averages(plan) else "",
        AFTER=after,
        ENUMERATE="index, microbatch in enumerate(microbatches)"
        if needs_last
        else "microbatch in microbatches",
        IS_LAST="        is_last = index == len(microbatches) - 1\n" if needs_last else "",
        BODY="\n".join([*before, *lines]),
    )


def _pipeline_step(plan: Plan, *, ties: bool) -> str:
    after = ""
    if averages(plan):
        after += "    for part in parts:\n        average_over_replicas(part.parameters(), mesh)\n"
    if ties:
        after += "    sum_tied_gradients(parts, groups)\n"
    text = Template(_PIPELINE_STEP).substitute(
        GROUPS=", groups" if ties else "",
        MESH=", mesh" if averages(plan) else "",
        AFTER=after,
    )
    return (_AVERAGE if averages(plan) else "") + (_TIED if ties else "") + text


def checkpoint_text(plan: Plan) -> str:
    """Saving and loading with torch.distributed.checkpoint."""
    return _PIPELINE_CHECKPOINT if plan.knobs().pp > 1 else _PLAIN_CHECKPOINT


def loop_text(plan: Plan, *, ties: bool) -> str:
    """Making everything, the loop, and the command line."""
    knobs = plan.knobs()
    shards, replicas = knobs.dp_shard > 1, knobs.dp_replicate > 1
    data_rank = "0"
    if shards and replicas:
        data_rank = (
            f'mesh.get_local_rank("dp_replicate") * {knobs.dp_shard} '
            '+ mesh.get_local_rank("dp_shard")'
        )
    elif shards or replicas:
        data_rank = f'mesh.get_local_rank("{"dp_shard" if shards else "dp_replicate"}")'
    arguments = step = "model, optimizer"
    if knobs.pp > 1:
        arguments = "parts, optimizers"
        step = "schedule, parts, optimizers" + (", groups" if ties else "")
    step += ", mesh" if averages(plan) else ""
    make = Template(_MAKE_STAGES if knobs.pp > 1 else _MAKE_MODEL).substitute(
        GROUPS="\n    groups = tied_groups(mesh)" if ties else ""
    )
    return Template(_LOOP).substitute(
        MAKE=make.strip("\n"),
        STATE=arguments,
        STEP=step,
        DATA_RANK=data_rank,
        COPIES=knobs.dp * knobs.tp,
        START=_START[device_type_of(plan)],
    )


_MODEL = '''
def build_model():
    """The model, with the same weights on every rank."""
    torch.manual_seed(SEED)
    model = $BUILD
    return model.to(DTYPE).train()


def loss_of(model, batch):
    """The scalar to minimise."""
    output = model($CALL)
    return $LOSS
'''

_RANDOM_BATCHES = '''

def make_batch(rows):
    """Random samples of the model's shapes: put your own data here."""
$BATCH


def batches(first):
    """Global batches from a step on, the same on every rank; each takes its own share."""
    for step in itertools.count(first):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED * 1_000_003 + step)
            yield make_batch(GLOBAL_BATCH)
'''

_FILE_BATCHES = '''

def samples():
    """The batches of the model's file, of any size, from the start again when they end."""
    while True:
        yield from MODEL.train_data(0, 1)


def batches(first):
    """Global batches from a step on, the same on every rank; each takes its own share."""
    held, step = {}, 0
    for batch in samples():
        held = {name: torch.cat([held[name], v]) if held else v for name, v in batch.items()}
        while len(next(iter(held.values()))) >= GLOBAL_BATCH:
            if step >= first:
                yield {name: value[:GLOBAL_BATCH] for name, value in held.items()}
            held = {name: value[GLOBAL_BATCH:] for name, value in held.items()}
            step += 1
'''

_PLAIN_STEP = '''
def train_step(model, optimizer$MESH, batch):
    """One optimizer step on this rank's samples; answers with their mean loss."""
    parts = {name: value.split(MICROBATCH) for name, value in batch.items()}
    microbatches = [dict(zip(parts, values)) for values in zip(*parts.values())]
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for $ENUMERATE:
$IS_LAST$BODY
        total += loss.detach()
$AFTER    optimizer.step()
    optimizer.zero_grad()
    return total
'''

_PIPELINE_STEP = '''
def train_step(schedule, parts, optimizers$GROUPS$MESH, batch):
    """One optimizer step on this rank's samples; their mean loss, 0 where no loss is seen."""
    losses = []
    has_loss = any(part.index == len(SPANS) - 1 for part in parts)
    # The model computes the loss itself; the runtime only wants to see that there is a target.
    target = torch.empty(NUM_MICROBATCHES) if has_loss else None
    schedule.step(**batch, target=target, losses=losses, return_outputs=False)
$AFTER    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    shares = [loss.detach().double() for loss in losses]
    return torch.stack(shares).sum() if shares else torch.zeros((), device=DEVICE).double()
'''

_AVERAGE = '''
def average_over_replicas(parameters, mesh):
    """What DDP does elsewhere; it takes no DTensors and sees no pipeline's last backward."""
    for gradient in (p.grad for p in parameters if p.grad is not None):
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(own, op=dist.ReduceOp.AVG, group=mesh.get_group("dp_replicate"))

'''

_CLIP = '''
def clip_gradients(parameters):
    """Scales all gradients by one factor where their norm is above the largest allowed."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms)).item()
    for gradient in gradients:
        gradient.mul_(min(1.0, CLIP_NORM / (total + 1e-6)))

'''

_TIED = '''
def tied_groups(mesh):
    """The ranks that share a parameter; every rank takes part in making every group."""
    found = []
    for stages in TIED:
        for ranks in mesh.mesh.movedim(0, -1).reshape(-1, mesh.size(0)).tolist():
            members = sorted({ranks[stage % len(ranks)] for stage in stages})
            group = dist.new_group(members)
            if dist.get_rank() in members:
                found.append((stages, group))
    return found


def sum_tied_gradients(parts, groups):
    """What each of the stages found for a shared parameter is a part of its gradient."""
    for stages, group in groups:
        for part in parts:
            if part.index in stages:
                gradient = part.model.get_parameter(stages[part.index]).grad
                own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(own, group=group)

'''

_PLAIN_CHECKPOINT = '''
def save(folder, model, optimizer):
    """Every rank writes its own part; the folder can be loaded on any number of ranks."""
    dcp.save(states(model, optimizer), checkpoint_id=folder)


def load(folder, model, optimizer):
    """Fills model and optimizer with what `save` wrote."""
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=FLAT,
    )


# One entry per parameter, so that ranks with different parameters can write together.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def states(model, optimizer):
    """Parameters and optimizer states by the names of the whole model."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    return {"model": model_state, "optimizer": optimizer_state}
'''

_PIPELINE_CHECKPOINT = '''
def save(folder, parts, optimizers):
    """Every rank writes its own part."""
    dcp.save(states(parts, optimizers), checkpoint_id=folder)


def load(folder, parts, optimizers):
    """Fills stages and optimizers with what `save` wrote."""
    state = states(parts, optimizers)
    dcp.load(state, checkpoint_id=folder)
    for part, optimizer in zip(parts, optimizers):
        model_state, optimizer_state = get_state_dict(part, optimizer, options=FLAT)
        set_state_dict(
            part,
            optimizer,
            model_state_dict={name: state["model"][name] for name in model_state},
            optim_state_dict={name: state["optimizer"][name] for name in optimizer_state},
            options=FLAT,
        )


# One entry per parameter, so that ranks with different parameters can write together.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def states(parts, optimizers):
    """Parameters and optimizer states of this rank's stages by name."""
    state = {"model": {}, "optimizer": {}}
    for part, optimizer in zip(parts, optimizers):
        model_state, optimizer_state = get_state_dict(part, optimizer, options=FLAT)
        state["model"] |= model_state
        state["optimizer"] |= optimizer_state
    return state
'''

_MAKE_MODEL = """
    model = build_model()
    model = wrap(model, [model.get_submodule(name) for name in BLOCKS], mesh)
    optimizer = make_optimizer(model)
"""

_MAKE_STAGES = """
    parts = []
    for index in stages_of(mesh.get_local_rank("pp")):
        part = Stage(build_model(), index)
        parts.append(wrap(part, [part.model.get_submodule(name) for name in part.blocks], mesh))
    schedule = make_schedule(parts, mesh)
    optimizers = [make_optimizer(part) for part in parts]$GROUPS
"""

_START = {
    "cpu": '    dist.init_process_group("gloo")',
    "cuda": (
        '    torch.cuda.set_device(DEVICE)\n    dist.init_process_group("nccl", device_id=DEVICE)'
    ),
}

_LOOP = '''
def train(steps, checkpoint_every=0, resume=None):
    """Trains to step `steps` and answers with the losses."""
    mesh = init_device_mesh(DEVICE.type, tuple(AXES.values()), mesh_dim_names=tuple(AXES))
$MAKE
    first, losses = 0, []
    if resume is not None:
        load(resume, $STATE)
        first = int(Path(resume).name.removeprefix("step"))
    data_rank = $DATA_RANK
    for step, batch in zip(range(first, steps), batches(first)):
        own = {name: value.chunk(DATA_RANKS)[data_rank] for name, value in batch.items()}
        own = {name: value.contiguous().to(DEVICE) for name, value in own.items()}
        loss = train_step($STEP, own)
        dist.all_reduce(loss)
        losses.append(loss.item() / $COPIES)
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {losses[-1]:.6f}", flush=True)
        if checkpoint_every and (step + 1) % checkpoint_every == 0:
            save(f"checkpoints/step{step + 1}", $STATE)
    return losses


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="N")
    parser.add_argument("--resume", metavar="FOLDER", help="such as checkpoints/step100")
    options = parser.parse_args()
$START
    train(options.steps, options.checkpoint_every, options.resume)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
