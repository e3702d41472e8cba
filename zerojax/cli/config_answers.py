"""The questions of `zerojax config`, and the files that their answers describe."""

from __future__ import annotations

import json
from dataclasses import dataclass

import yaml
from rich.console import Console
from rich.prompt import FloatPrompt, IntPrompt, Prompt

_PLACES = ("none", "cpu", "nvme")
_OPTIMIZERS = ("AdamW", "Adam", "Lamb", "Lion", "Muon", "SGD", "none")
PORT = 29500
"""The default port of the first machine, Accelerate's."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers to the questions, with the defaults.

    Attributes:
      devices: Number of devices of all machines.
      on_cpu: Whether the devices are CPUs.
      machines, rank, address, port: The number of machines, the index of this one, and the
        address of the first; only for the YAML.
      stage: ZeRO's stage.
      offload_optimizer, offload_param: Where the optimizer state and the parameters are stored:
        "none", on the devices, "cpu" or "nvme".
      nvme_path: The folder of what is stored on NVMe.
      precision: "no", "bf16" or "fp16".
      accumulation: Micro-batches of an update.
      clipping: Largest norm of the gradient; 0 turns clipping off.
      micro: Rows of a micro-batch on each device; None: the program's batch decides.
      optimizer: The name of an optimizer; "none": the program's. Only for the JSON.
      learning_rate: Its learning rate; None: "auto", which the program fills.
    """

    devices: int = 1
    on_cpu: bool = False
    machines: int = 1
    rank: int = 0
    address: str = ""
    port: int = PORT
    stage: int = 2
    offload_optimizer: str = "none"
    offload_param: str = "none"
    nvme_path: str = "/local_nvme"
    precision: str = "no"
    accumulation: int = 1
    clipping: float = 1.0
    micro: int | None = None
    optimizer: str = "AdamW"
    learning_rate: float | None = None


def ask(console: Console, found: Answers, as_yaml: bool) -> Answers:
    """Asks the questions on a console; an empty answer takes the default of `found`.

    Raises:
      EOFError: The input ended before the last answer.
    """

    def choose(question: str, choices: tuple[str, ...], default: str) -> str:
        return Prompt.ask(question, choices=[*choices], default=default, console=console)

    def count(question: str, default: int, least: int = 1) -> int:
        while (number := IntPrompt.ask(question, default=default, console=console)) < least:
            console.print(f"[prompt.invalid]A number from {least} is needed")
        return number

    def rate(question: str, default: float) -> float:
        while (number := FloatPrompt.ask(question, default=default, console=console)) < 0:
            console.print("[prompt.invalid]A number from 0 is needed")
        return number

    machines, rank, address, port = found.machines, found.rank, found.address, found.port
    devices = found.devices
    if as_yaml:
        machines = count("Machines", machines)
        if machines > 1:
            rank = int(choose("Index of this machine", tuple(map(str, range(machines))), "0"))
            while not address:
                address = Prompt.ask("Address of machine 0", console=console).strip()
            port = count("Port of machine 0", port)
        devices = machines * count("Processes of each machine, one a device", devices)
    stage = int(choose("ZeRO stage", ("0", "1", "2", "3"), str(found.stage)))
    offload_optimizer = offload_param = "none"
    if stage:
        offload_optimizer = choose("Offload of the optimizer state", _PLACES, offload_optimizer)
    if stage == 3:
        offload_param = choose("Offload of the parameters", _PLACES, offload_param)
    nvme_path = found.nvme_path
    if "nvme" in (offload_optimizer, offload_param):
        nvme_path = Prompt.ask("Folder on the NVMe disk", default=nvme_path, console=console)
    precision = choose("Precision", ("no", "bf16", "fp16"), found.precision)
    accumulation = count("Micro-batches of an update", found.accumulation)
    clipping = rate("Largest norm of the gradient (0: no clipping)", found.clipping)
    micro, optimizer, learning_rate = found.micro, found.optimizer, found.learning_rate
    if not as_yaml:
        rows = count("Rows of a micro-batch on each device (0: as the program has it)", 0, least=0)
        micro = rows or None
        optimizer = choose("Optimizer (none: the program's)", _OPTIMIZERS, optimizer)
        if optimizer != "none":
            given = rate("Learning rate (0: as the program has it)", 0.0)
            learning_rate = given or None
    return Answers(
        devices=devices,
        on_cpu=found.on_cpu,
        machines=machines,
        rank=rank,
        address=address,
        port=port,
        stage=stage,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        nvme_path=nvme_path,
        precision=precision,
        accumulation=accumulation,
        clipping=clipping,
        micro=micro,
        optimizer=optimizer,
        learning_rate=learning_rate,
    )


def to_json(answers: Answers) -> str:
    """Returns a DeepSpeed config, as text.

    Example:
      >>> print(to_json(Answers(stage=1, optimizer="none")).partition("gradient")[0])
      {
        "zero_optimization": {
          "stage": 1
        },
        "
    """
    zero: dict[str, object] = {"stage": answers.stage}
    for name in ("offload_optimizer", "offload_param"):
        if (device := getattr(answers, name)) != "none":
            path = {"nvme_path": answers.nvme_path} if device == "nvme" else {}
            zero[name] = {"device": device, **path}
    config: dict[str, object] = {"zero_optimization": zero}
    if answers.precision != "no":
        config[answers.precision] = {"enabled": True}
    if answers.optimizer != "none":
        rate = "auto" if answers.learning_rate is None else answers.learning_rate
        config["optimizer"] = {"type": answers.optimizer, "params": {"lr": rate}}
    config |= {
        "gradient_accumulation_steps": answers.accumulation,
        "gradient_clipping": answers.clipping,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto" if answers.micro is None else answers.micro,
    }
    return json.dumps(config, indent=2) + "\n"


def to_yaml(answers: Answers) -> str:
    """Returns the YAML that `accelerate config` writes for these answers, as text."""
    deepspeed: dict[str, object] = {
        "gradient_accumulation_steps": answers.accumulation,
        "gradient_clipping": answers.clipping,
        "offload_optimizer_device": answers.offload_optimizer,
        "offload_param_device": answers.offload_param,
        "zero3_init_flag": answers.stage == 3,
        "zero_stage": answers.stage,
    }
    for name in ("optimizer", "param"):
        if deepspeed[f"offload_{name}_device"] == "nvme":
            deepspeed[f"offload_{name}_nvme_path"] = answers.nvme_path
    several = answers.machines > 1
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "deepspeed_config": deepspeed,
        "distributed_type": "DEEPSPEED",
        "machine_rank": answers.rank,
        "main_process_ip": answers.address if several else None,
        "main_process_port": answers.port if several else None,
        "main_training_function": "main",
        "mixed_precision": answers.precision,
        "num_machines": answers.machines,
        "num_processes": answers.devices,
        "use_cpu": answers.on_cpu,
    }
    text: str = yaml.safe_dump(config)
    return text
