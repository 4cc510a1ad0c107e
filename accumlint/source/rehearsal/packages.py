"""Well-known libraries that leave the training alone, whatever they are given."""

from __future__ import annotations

HARMLESS_PACKAGES = frozenset(
    """
    numpy math random time os sys json logging warnings pathlib shutil copy collections itertools functools operator re glob pickle
    yaml wandb tqdm tensorboard tensorboardX mlflow comet_ml neptune clearml swanlab aim loguru rich matplotlib seaborn plotly pandas
    scipy sklearn torchmetrics torchvision torchaudio torchinfo torchsummary ptflops thop fvcore prettytable tabulate PIL cv2 imageio
    einops omegaconf hydra argparse absl simple_parsing evaluate datasets tokenizers sentencepiece nltk psutil pynvml GPUtil
    """.split()
)


def is_of_harmless_package(path: str) -> bool:
    """Whether a call is one of a library that is known to leave training alone."""
    return path.partition(".")[0] in HARMLESS_PACKAGES
