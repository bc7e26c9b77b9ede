from __future__ import annotations

import pytest

from triptych.base.config import ScalingConfig, check_scaling
from triptych.base.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ScalingConfig(min_encoders=3, max_encoders=2), "--min-encoders 3 is above --max-encoders 2"),
        (ScalingConfig(min_encoders=-1, max_encoders=2), "--min-encoders -1: at least 0"),
        (ScalingConfig(min_pd_workers=0, max_pd_workers=2), "--min-pd-workers 0: at least 1"),
        (ScalingConfig(max_pd_workers=-2), "--max-pd-workers -2"),
        (ScalingConfig(max_encoders=2, encoder_slo=0.0), "--encoder-slo 0"),
        (ScalingConfig(max_encoders=2, encoder_slo=float("nan")), "--encoder-slo nan"),
        (ScalingConfig(max_encoders=2, scale_window=1e9), "--scale-window 1e"),
        (ScalingConfig(scaler_port=8002), "--scaler-port answers with decisions, and none is made"),
    ],
)
def test_what_no_pool_can_be_scaled_by_is_refused_with_the_flag(config: ScalingConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_scaling(config)
