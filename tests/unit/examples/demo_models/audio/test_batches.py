"""What training hears and shall write equals what the server hears and reads."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperTokenizer

from examples.demo_models.audio.batches import (
    IGNORED,
    LogMel,
    Writer,
    end_step,
    rest_of,
    row_labels,
    training_batch,
)
from examples.demo_models.audio.checkpoint import make_extractor, make_model, save_checkpoint
from examples.demo_models.audio.recordings import WINDOW_SECONDS, Recording, random_recording, sound
from examples.demo_models.audio.tokens import make_tokenizer
from examples.demo_models.audio.train import encode
from support.data.sounds import Sound
from triptych.demo.tones import RATE, dial
from triptych.models.families.whisper import WhisperAudioEncoder
from triptych.proxy.openai.audio.windows import Window, segment_window
from triptych.types import TimestampTokens


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return make_tokenizer()


def recorded(digits: str) -> Recording:
    tones = dial(digits)
    seconds = tones[-1].end + 0.4 if tones else 1.0
    return Recording(tones, seconds, 20.0, False, 0.5, 1.0, 0.0, 3)


def padded(recording: Recording) -> torch.Tensor:
    """[1, samples] of a whole window."""
    out = np.zeros((1, WINDOW_SECONDS * RATE), dtype=np.float32)
    output = sound(recording)
    out[0, : len(output)] = output
    return torch.from_numpy(out)


def test_features_equal_the_extractors() -> None:
    random = np.random.default_rng(0)
    recordings = [random_recording(random, length) for length in (3, 8)]
    wanted = make_extractor()([sound(one) for one in recordings], sampling_rate=RATE, return_tensors="pt")
    made = LogMel()(torch.cat([padded(one) for one in recordings]))
    torch.testing.assert_close(made, wanted["input_features"], rtol=0, atol=1e-5)


def test_what_follows_a_recording_is_the_servers_second_window(
    tokenizer: WhisperTokenizer, tmp_path: Path
) -> None:
    recording = recorded("507")
    save_checkpoint(make_model(tokenizer), tokenizer, tmp_path)
    encoder = WhisperAudioEncoder.load(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    item = encoder.preprocess(Sound(sound(recording)), {"start_frame": 2 * end_step(recording)})
    made = rest_of(LogMel()(padded(recording))[0], recording)
    torch.testing.assert_close(made, item.tensors["input_features"], rtol=0, atol=1e-5)


def test_the_encoder_is_transformers_own(tokenizer: WhisperTokenizer) -> None:
    encoder = make_model(tokenizer).eval().model.encoder
    features = LogMel()(padded(recorded("507")))
    with torch.no_grad():
        torch.testing.assert_close(encode(encoder, features), encoder(features).last_hidden_state)


def test_the_server_reads_a_written_recording_as_one_segment_with_its_times(
    tokenizer: WhisperTokenizer,
) -> None:
    recording = recorded("507")
    ids, labels = Writer(tokenizer).write(recording, timed=True)
    assert labels == [*ids[1:], tokenizer.eos_token_id]
    times = TimestampTokens(int(tokenizer.convert_tokens_to_ids("<|0.00|>")), 0.02)
    frames = round(recording.seconds * 100)
    output = segment_window(Window(0, frames, frames), labels, times, full=500, eos=True)
    (span,) = output.spans
    assert (span.start, span.end) == pytest.approx((0.4, 1.1))
    assert tokenizer.decode(labels[span.first : span.last], skip_special_tokens=True).strip() == "507"
    assert output.next_start == 110


@pytest.mark.parametrize("timed", [True, False])
def test_a_recording_of_nothing_is_written_as_nothing(tokenizer: WhisperTokenizer, timed: bool) -> None:
    _, labels = Writer(tokenizer).write(recorded(""), timed=timed)
    learnt = [label for label in labels if label != IGNORED]
    wanted = ["<|0.00|>", "<|endoftext|>"] if timed else ["<|endoftext|>"]
    assert tokenizer.convert_ids_to_tokens(learnt) == wanted


def test_rows_know_the_digit_that_sounds_and_how_many_began() -> None:
    digit, count = row_labels(recorded("57"), 60)
    assert digit[[19, 20, 27, 28, 33, 39, 41]].tolist() == [10, 5, 5, 10, 7, 7, 10]
    assert count[[19, 20, 28, 33, 59]].tolist() == [0, 1, 1, 2, 2]


def test_a_batch_of_short_windows_fits_them(tokenizer: WhisperTokenizer) -> None:
    batch = training_batch(np.random.default_rng(0), Writer(tokenizer), LogMel(), 12, 2.5, 4)
    assert batch.features.shape == (12, 80, 250)
    assert batch.digit.shape == batch.count.shape == (12, 125)
    assert batch.ids.shape == batch.labels.shape
    assert batch.count.max() <= 4
