"""Published measurements of real cards against the virtual one. Nothing here is fitted."""
import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo_lab import VirtualGPU

MiB = 2**20


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_lora_step_of_a_1_5b_model_on_a_t4():
    """Anassbzdd/fitcheck (MIT), T4, torch 2.10, transformers 5.0: Qwen2.5-1.5B in float16, LoRA r=32 on q, k, v, o in
    float32, 2 × 1024 tokens, non-reentrant checkpointing, torch.optim.AdamW; `out` is alive until the step returns."""
    with VirtualGPU("T4") as gpu:
        model = gpu.load("Qwen2.5-1.5B", dtype="float16")
        model = get_peft_model(model, LoraConfig(r=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        ids = torch.zeros(2, 1024, dtype=torch.long)

        def step():
            with gpu.phase("forward"):
                out = model(input_ids=ids, labels=ids)
            with gpu.phase("backward"):
                out.loss.backward()
            with gpu.phase("optimizer"):
                optimizer.step()
            optimizer.zero_grad()

        step()
        step()
    report = gpu.report()
    allocated = report.phases["peak_allocated"] / MiB
    for phase, published in {"forward": 6220, "backward": 7402, "optimizer": 3736}.items():
        assert allocated[phase] == pytest.approx(published, rel=0.01), phase
    assert report.peak_reserved / MiB == pytest.approx(7766, rel=0.02)
