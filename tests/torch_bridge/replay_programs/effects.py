"""Programs whose forward does more than compute: it prints, counts, hands tensors on, raises, draws random numbers, asks the clock, uses threads."""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import logging
import os
import pathlib
import queue
import random
import sys
import tempfile
import threading
import time
import types
import uuid
import warnings

import numpy as np
import torch
from torch import nn

from tests.torch_bridge.replay_programs.running import Net, Run, descend
from tests.torch_bridge.replay_programs.table import program


@program("output")
def prints(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            print("forward")
            return self.layer(x)

    run.train(Model())


@program("output")
def prints_in_a_helper(run: Run) -> None:
    class Tracer:
        def say(self, text):
            print(text, file=sys.stdout)

    tracer = Tracer()

    class Model(Net):
        def forward(self, x):
            tracer.say(f"shape {tuple(x.shape)}")
            return self.layer(x)

    run.train(Model())


@program("output")
def writes_to_stdout(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            sys.stdout.write("forward\n")
            return self.layer(x)

    run.train(Model())


@program("output")
def writes_to_a_text_buffer(run: Run) -> None:
    log = io.StringIO()

    class Model(Net):
        def forward(self, x):
            log.write("x")
            return self.layer(x)

    run.train(Model(), watch=log.getvalue)


@program("output")
def logs(run: Run) -> None:
    logger = logging.getLogger("replay_program")
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger.addHandler(handler)
    run.cleanup.callback(logger.removeHandler, handler)

    class Model(Net):
        def forward(self, x):
            logger.warning("forward of %s", tuple(x.shape))
            return self.layer(x)

    run.train(Model(), watch=lambda: len(found))


@program("output")
def level_of_a_logger(run: Run) -> None:
    logger = logging.getLogger("replay_program")
    run.cleanup.callback(logger.setLevel, logging.NOTSET)
    logger.setLevel(logging.WARNING)

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y * 3.0 if logger.isEnabledFor(logging.DEBUG) else y

    run.train(Model(), lambda: logger.setLevel(logging.DEBUG))


@program("output")
def warns(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            warnings.warn("program: forward", stacklevel=1)
            return self.layer(x)

    run.train(Model())


@program("output")
def writes_a_file(run: Run) -> None:
    folder = pathlib.Path(run.cleanup.enter_context(tempfile.TemporaryDirectory()))

    class Model(Net):
        def forward(self, x):
            with open(folder / "log", "a") as f:
                f.write("x")
            return self.layer(x)

    run.train(Model(), watch=(folder / "log").read_text)


@program("output")
def reads_a_file(run: Run) -> None:
    folder = pathlib.Path(run.cleanup.enter_context(tempfile.TemporaryDirectory()))
    (folder / "scale").write_text("1.0")

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * float((folder / "scale").read_text())

    run.train(Model(), lambda: (folder / "scale").write_text("3.0"))


@program("output")
def a_file_exists(run: Run) -> None:
    folder = run.cleanup.enter_context(tempfile.TemporaryDirectory())

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if os.path.exists(folder + "/flag") else 1.0)

    run.train(Model(), lambda: open(folder + "/flag", "w").close())


@program("output")
def descriptor_of_a_pipe(run: Run) -> None:
    read, write = os.pipe()
    run.cleanup.callback(os.close, read)
    run.cleanup.callback(os.close, write)

    class Model(Net):
        def forward(self, x):
            os.write(write, b"x")
            return self.layer(x)

    run.train(Model())
    os.write(write, b".")
    run.note(os.read(read, 100))


@program("meters")
def counter_on_the_model(run: Run) -> None:
    class Model(Net):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return self.layer(x)

    model = Model()
    run.train(model, watch=lambda: model.calls)


@program("meters")
def counter_on_a_class(run: Run) -> None:
    class Stats:
        calls = 0

    class Model(Net):
        def forward(self, x):
            Stats.calls += 1
            return self.layer(x)

    run.train(Model(), watch=lambda: Stats.calls)


@program("meters")
def meter_object(run: Run) -> None:
    class Meter:
        def __init__(self):
            self.sum, self.count = 0.0, 0

        def update(self, value, n=1):
            self.sum += value * n
            self.count += n

    meter = Meter()

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            meter.update(0.5, n=x.shape[0])
            return y

    run.train(Model(), watch=lambda: (meter.sum, meter.count))


@program("meters")
def meter_of_losses(run: Run) -> None:
    class Meter:
        def __init__(self):
            self.values = []

        def update(self, value):
            self.values.append(value.detach())

    meter = Meter()

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            meter.update(y.square().mean())
            return y

    run.train(Model(), watch=lambda: (len(meter.values), meter.values[-1]))


@program("meters")
def meter_that_reads_the_value(run: Run) -> None:
    values = []

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            values.append(y.detach().mean().item())
            return y

    run.train(Model(), watch=lambda: list(values))


@program("meters")
def meter_in_a_submodule(run: Run) -> None:
    counts = collections.Counter()

    class Inner(Net):
        def forward(self, x):
            counts[type(self).__name__] += 1
            return self.layer(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Inner(), Inner()

        def forward(self, x):
            return self.b(self.a(x))

    run.train(Model(), watch=lambda: dict(counts))


@program("handing tensors on")
def auxiliary_loss_added_elsewhere(run: Run) -> None:
    class Losses:
        def __init__(self):
            self.all = []

        def add_loss(self, loss):
            self.all.append(loss)

    losses = Losses()

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            losses.add_loss(y.abs().mean())
            return y

    def call(model, x, k):
        losses.all.clear()
        out = model(x)
        return [out, *losses.all]

    run.train(Model(), call=call, watch=lambda: len(losses.all))


@program("handing tensors on")
def auxiliary_loss_on_the_module(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            self.aux_loss = y.abs().mean()
            return y

    def call(model, x, k):
        out = model(x)
        return [out, model.aux_loss]

    run.train(Model(), call=call)


@program("handing tensors on")
def auxiliary_loss_on_a_class(run: Run) -> None:
    class Router:
        aux = None

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            Router.aux = y.abs().mean()
            return y

    run.train(Model(), call=lambda m, x, k: [m(x), Router.aux])


@program("handing tensors on")
def auxiliary_loss_of_a_submodule(run: Run) -> None:
    class Router(Net):
        aux = None

        def forward(self, x):
            y = self.layer(x)
            self.aux = y.softmax(-1).square().mean()
            return y

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.router = Router()

        def forward(self, x):
            return self.layer(self.router(x))

    run.train(Model(), call=lambda m, x, k: [m(x), m.router.aux])


@program("handing tensors on")
def global_dict_of_activations(run: Run) -> None:
    kept = {}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            kept["y"] = y
            return y.tanh()

    run.train(Model(), call=lambda m, x, k: [m(x), kept["y"]])


@program("handing tensors on")
def queue_of_activations(run: Run) -> None:
    waiting = queue.SimpleQueue()

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            waiting.put(y.detach())
            return y

    def watch():
        return [waiting.get_nowait() for _ in range(waiting.qsize())]

    run.train(Model(), watch=watch)


@program("handing tensors on")
def closure_keeps_the_last(run: Run) -> None:
    def make():
        last = None

        def keep(t):
            nonlocal last
            last = t

        return keep, lambda: last

    keep, get = make()

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            keep(y.detach() * 2)
            return y

    run.train(Model(), watch=get)


@program("handing tensors on")
def generator_receives_tensors(run: Run) -> None:
    totals = []

    def collect():
        while True:
            t = yield
            totals.append(t.detach().sum())

    sink = collect()
    next(sink)

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            sink.send(y)
            return y

    run.train(Model(), watch=lambda: [len(totals), totals[-1]])


@program("handing tensors on")
def attribute_put_on_the_input(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            x.seen = y.detach()
            return y

    run.train(Model(), call=lambda m, x, k: [m(x), x.seen])


@program("handing tensors on")
def attribute_put_on_the_output(run: Run) -> None:
    counts = itertools.count()

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            y.number = next(counts)
            return y

    numbers = []
    run.train(Model(), call=lambda m, x, k: (lambda out: numbers.append(out.number) or out)(m(x)))
    run.note(numbers)


@program("handing tensors on")
def attribute_put_on_a_parameter(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            self.layer.weight.uses = getattr(self.layer.weight, "uses", 0) + 1
            return self.layer(x)

    model = Model()
    run.train(model, watch=lambda: model.layer.weight.uses)


@program("handing tensors on")
def attribute_of_a_parameter_read(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * self.layer.weight.gain

    model = run.place(Model())
    model.layer.weight.gain = 1.0
    run.train(model, lambda: setattr(model.layer.weight, "gain", 3.0), place=False)


@program("handing tensors on")
def input_list_changed(run: Run) -> None:
    class Model(Net):
        def forward(self, x, states):
            y = self.layer(x)
            states.append(y)
            return y

    def call(model, x, k):
        states = []
        return [model(x, states), *states]

    run.train(Model(), call=call)


@program("handing tensors on")
def input_dict_changed(run: Run) -> None:
    class Model(Net):
        def forward(self, batch):
            batch["out"] = self.layer(batch["x"])
            return batch

    def call(model, x, k):
        batch = {"x": x}
        model(batch)
        return list(batch.values())

    run.train(Model(), call=call)


@program("handing tensors on", careless="it returns the same tensor again and nothing else is read")
def result_dict_is_new_every_time(run: Run) -> None:
    results = []

    class Model(Net):
        def forward(self, x):
            return {"y": self.layer(x)}

    def call(model, x, k):
        out = model(x)
        results.append(out)
        out["extra"] = out["y"] * 2
        return out

    run.train(Model(), call=call)
    run.note(len({id(r) for r in results}))


@program("handing tensors on")
def result_is_kept_by_the_module(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.out = {}

        def forward(self, x):
            self.out["y"] = self.layer(x)
            return self.out

    model = Model()
    same = []
    run.train(model, call=lambda m, x, k: (lambda out: same.append(out is m.out) or out)(m(x)))
    run.note(same)


@program("handing tensors on")
def result_object_is_kept(run: Run) -> None:
    class Output:
        def __init__(self, y):
            self.y = y

    class Model(Net):
        last = None

        def forward(self, x):
            self.last = Output(self.layer(x))
            return self.last

    run.train(Model(), call=lambda m, x, k: [m(x).y, m.last.y * 2])


@program("handing tensors on")
def result_of_the_last_step_is_reused(run: Run) -> None:
    class Model(Net):
        memory = None

        def forward(self, x):
            y = self.layer(x)
            if self.memory is not None:
                y = y + self.memory
            self.memory = y.detach()
            return y

    run.train(Model())


@program("handing tensors on")
def same_list_object_in_the_result(run: Run) -> None:
    history = []

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            history.append(y.detach().mean())
            return y, history

    run.train(Model(), loss=lambda out: out[0].square().mean() + sum(out[1]) * 0.1, watch=lambda: len(history))


@program("errors")
def raises_after_five_calls(run: Run) -> None:
    calls = []

    class Model(Net):
        def forward(self, x):
            calls.append(1)
            if len(calls) > 5:
                raise RuntimeError(f"call {len(calls)}")
            return self.layer(x)

    run.train(Model())


@program("errors")
def raises_when_told_to(run: Run) -> None:
    class Budget:
        left = 5

        def spend(self):
            if not self.left:
                raise ValueError("no budget left")
            self.left -= 1

    budget = Budget()

    class Model(Net):
        def forward(self, x):
            budget.spend()
            return self.layer(x)

    run.train(Model(), watch=lambda: budget.left)


@program("errors")
def raises_once(run: Run) -> None:
    state = {"fail": False}

    class Model(Net):
        def forward(self, x):
            if state["fail"]:
                state["fail"] = False
                raise KeyError("once")
            return self.layer(x)

    run.train(Model(), lambda: state.update(fail=True))


@program("errors")
def checks_its_input(run: Run) -> None:
    state = {"largest": 100.0}

    class Model(Net):
        def forward(self, x):
            if float(x.abs().max()) > state["largest"]:
                raise ValueError("too large")
            return self.layer(x)

    run.train(Model(), lambda: state.update(largest=0.1))


@program("errors")
def stops_by_stop_iteration(run: Run) -> None:
    scales = iter([1.0] * 5)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * next(scales)

    run.train(Model())


@program("random numbers")
def python_random(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * random.random()

    run.train(Model())


@program("random numbers")
def random_layer_drop(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y if random.random() < 0.45 else y + x

    run.train(Model())


@program("random numbers")
def own_random_generator(run: Run) -> None:
    rng = random.Random(5)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * rng.choice([1.0, 2.0, 3.0])

    run.train(Model())


@program("random numbers")
def numpy_random(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * float(np.random.rand())

    run.train(Model())


@program("random numbers")
def own_numpy_generator(run: Run) -> None:
    class Helper:
        rng = np.random.default_rng(0)

        def draw(self):
            return float(self.rng.normal())

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.draw()

    run.train(Model())


@program("random numbers")
def torch_random_on_the_cpu(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * torch.rand(()).item()

    run.train(Model())


@program("random numbers", careless="it calls torch.rand again")
def random_tensor_of_the_cpu(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * torch.rand(6).to(run.device)

    run.train(Model())


@program("random numbers", careless="it draws again from the same generator")
def own_torch_generator(run: Run) -> None:
    generator = torch.Generator().manual_seed(3)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * torch.rand(6, generator=generator).to(run.device)

    run.train(Model())


@program("random numbers")
def seeded_in_forward(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            torch.manual_seed(5)
            return self.layer(x) + torch.rand(6).to(run.device)

    run.train(Model(), watch=lambda: torch.rand(2))


@program("random numbers")
def secret_and_uuid(run: Run) -> None:
    seen = []

    class Model(Net):
        def forward(self, x):
            seen.append(uuid.uuid4())
            return self.layer(x)

    run.train(Model(), watch=lambda: len(set(seen)))


@program("clock")
def clock_patched(run: Run) -> None:
    now = [0.0]
    time.time = lambda: now[0]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if time.time() < 5 else 3.0)

    run.train(Model(), lambda: now.__setitem__(0, 10.0))


@program("clock")
def clock_is_noted(run: Run) -> None:
    stamps = []

    class Model(Net):
        def forward(self, x):
            stamps.append(time.perf_counter_ns())
            return self.layer(x)

    run.train(Model(), watch=lambda: len(set(stamps)))


@program("clock")
def deadline(run: Run) -> None:
    state = {"deadline": time.monotonic() + 3600}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if time.monotonic() < state["deadline"] else 3.0)

    run.train(Model(), lambda: state.update(deadline=time.monotonic() - 1))


@program("environment")
def environment_variable(run: Run) -> None:
    os.environ["REPLAY_SCALE"] = "1.0"

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * float(os.environ["REPLAY_SCALE"])

    run.train(Model(), lambda: os.environ.update(REPLAY_SCALE="3.0"))


@program("environment")
def environment_variable_by_getenv(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * float(os.getenv("REPLAY_SCALE", "1.0"))

    run.train(Model(), lambda: os.environ.update(REPLAY_SCALE="3.0"))


@program("environment")
def environment_variable_in_a_helper(run: Run) -> None:
    def debugging():
        return "REPLAY_DEBUG" in os.environ

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y * 3.0 if debugging() else y

    run.train(Model(), lambda: os.environ.update(REPLAY_DEBUG="1"))


@program("environment")
def environment_variable_set_in_forward(run: Run) -> None:
    os.environ["REPLAY_CALLS"] = "0"

    class Model(Net):
        def forward(self, x):
            os.environ["REPLAY_CALLS"] = str(int(os.environ["REPLAY_CALLS"]) + 1)
            return self.layer(x)

    run.train(Model(), watch=lambda: os.environ["REPLAY_CALLS"])


@program("environment")
def arguments_of_the_script(run: Run) -> None:
    before = sys.argv
    run.cleanup.callback(lambda: setattr(sys, "argv", before))
    sys.argv = ["script", "1.0"]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * float(sys.argv[1])

    run.train(Model(), lambda: sys.argv.__setitem__(1, "3.0"))


@program("environment")
def recursion_limit(run: Run) -> None:
    before = sys.getrecursionlimit()
    run.cleanup.callback(sys.setrecursionlimit, before)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if sys.getrecursionlimit() == before else 3.0)

    run.train(Model(), lambda: sys.setrecursionlimit(before + 7))


@program("environment")
def working_directory(run: Run) -> None:
    before = os.getcwd()
    folder = run.cleanup.enter_context(tempfile.TemporaryDirectory())
    run.cleanup.callback(os.chdir, before)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if os.getcwd() == before else 3.0)

    run.train(Model(), lambda: os.chdir(folder))


@program("threads")
def thread_local_state(run: Run) -> None:
    local = threading.local()
    local.scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * local.scale

    run.train(Model(), lambda: setattr(local, "scale", 3.0))


@program("threads")
def name_of_the_thread(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if threading.current_thread().name == "other" else 1.0)

    run.train(Model(), call=lambda m, x, k: m(x) if k < 5 else in_thread(lambda: m(x), "other"))


def in_thread(function, name="worker"):
    """The result of a function that another thread calls, or its error."""
    found = []

    def work():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


@program("threads")
def thread_local_in_another_thread(run: Run) -> None:
    class Local(threading.local):
        scale = 1.0

    local = Local()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * local.scale

    def work(model, x):
        local.scale = 3.0
        return model(x)

    run.train(Model(), call=lambda m, x, k: m(x) if k < 5 else in_thread(lambda: work(m, x)))


@program("threads")
def lock_is_held(run: Run) -> None:
    lock = threading.Lock()

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            if not lock.acquire(blocking=False):
                return y * 3.0
            lock.release()
            return y

    run.train(Model(), lambda: lock.acquire())


@program("threads")
def event_is_set(run: Run) -> None:
    event = threading.Event()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if event.is_set() else 1.0)

    run.train(Model(), event.set)


@program("threads")
def thread_started_in_forward(run: Run) -> None:
    done = []

    class Model(Net):
        def forward(self, x):
            thread = threading.Thread(target=done.append, args=(1,))
            thread.start()
            thread.join()
            return self.layer(x)

    run.train(Model(), watch=lambda: len(done))


@program("threads")
def thread_changes_state_meanwhile(run: Run) -> None:
    state = {"scale": 1.0}
    orders = queue.Queue()
    answers = queue.Queue()

    def serve():
        while (order := orders.get()) is not None:
            state["scale"] = order
            answers.put(True)

    thread = threading.Thread(target=serve)
    thread.start()
    run.cleanup.callback(thread.join)
    run.cleanup.callback(orders.put, None)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * state["scale"]

    run.train(Model(), lambda: (orders.put(3.0), answers.get()))


def train_in_threads(run: Run, models: list, change=None, batches=None) -> list:
    """Train each model (one may be there twice, then they take turns) in a thread of its own; the losses of each."""
    losses = [[] for _ in models]
    turn = threading.Condition()
    now = [0]

    def take_turns(i):
        for k in range(8):
            with turn:
                turn.wait_for(lambda: now[0] % len(models) == i)
                if k == 5 and i == 0 and change is not None:
                    change()
                try:
                    loss = models[i](run.batch(k)).square().mean()
                    models[i].zero_grad()
                    loss.backward()
                    descend(models[i])
                    run.sync()
                    losses[i].append(loss.detach().cpu())
                except Exception as error:
                    losses[i].append(repr(error))
                now[0] += 1
                turn.notify_all()

    threads = [threading.Thread(target=take_turns, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return losses


@program("threads")
def two_threads_train_their_own(run: Run) -> None:
    class Config:
        scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    run.note(train_in_threads(run, [run.place(Model()), run.place(Model())], lambda: setattr(Config, "scale", 3.0)))


@program("threads")
def two_threads_train_one(run: Run) -> None:
    class Config:
        scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    model = run.place(Model())
    run.note(train_in_threads(run, [model, model], lambda: setattr(Config, "scale", 3.0)))


@program("threads")
def thread_reads_its_own_state(run: Run) -> None:
    scales = {}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scales.setdefault(threading.get_ident(), 1.0 + len(scales))

    model = run.place(Model())
    run.note(train_in_threads(run, [model, model, model]))


@program("threads")
def losses_of_threads_that_do_not_wait(run: Run) -> None:
    class Model(Net):
        def __init__(self, scale):
            super().__init__()
            self.state = types.SimpleNamespace(calls=0, scale=scale)

        def forward(self, x):
            self.state.calls += 1
            return self.layer(x) * self.state.scale

    models = [run.place(Model(1.0 + i)) for i in range(3)]
    start = threading.Barrier(3)
    losses = [[] for _ in models]

    def work(i):
        start.wait()
        for k in range(8):
            if k == 5:
                models[i].state.scale += 2
            try:
                loss = models[i](run.batch(k)).square().mean()
                models[i].zero_grad()
                loss.backward()
                descend(models[i])
                losses[i].append(loss.detach().cpu())
            except Exception as error:
                losses[i].append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.note(losses, [m.state.calls for m in models])


@program("output")
def redirected_inside(run: Run) -> None:
    texts = []

    class Model(Net):
        def forward(self, x):
            with contextlib.redirect_stdout(io.StringIO()) as text:
                print("inside")
            texts.append(text.getvalue())
            return self.layer(x)

    run.train(Model(), watch=lambda: len(texts))


@program("output")
def profile_function_counts(run: Run) -> None:
    state = {"profiling": False}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if state["profiling"] and sys.getprofile() is None else 1.0)

    run.train(Model(), lambda: state.update(profiling=True))
