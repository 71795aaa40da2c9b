package anarchon

import (
	"encoding/json"
	"os"
	"testing"
	"time"
)

// vectors reads the cases that every client must pass.
func vectors[Cases any](t *testing.T, file string) Cases {
	t.Helper()
	text, err := os.ReadFile("../../tests/conformance/vectors/" + file)
	if err != nil {
		t.Fatal(err)
	}
	var cases Cases
	if err := json.Unmarshal(text, &cases); err != nil {
		t.Fatal(err)
	}
	return cases
}

type durationCases struct {
	Valid []struct {
		Text       string
		DurationMS int64 `json:"duration_ms"`
		Canonical  string
	}
	Invalid        []struct{ Text string }
	InvalidPeriods []struct{ Text string } `json:"invalid_periods"`
}

func TestADurationInTextMeansWhatTheVectorsSay(t *testing.T) {
	cases := vectors[durationCases](t, "durations.json")
	if len(cases.Valid) == 0 || len(cases.Invalid) == 0 || len(cases.InvalidPeriods) == 0 {
		t.Fatal("no cases")
	}
	for _, each := range cases.Valid {
		got, err := ParseDuration(each.Text)
		if err != nil || got.Milliseconds() != each.DurationMS {
			t.Errorf("%q: %v, %v; want %d ms", each.Text, got, err, each.DurationMS)
		}
		if text := textOf(got); text != each.Canonical {
			t.Errorf("%q: shown as %q; want %q", each.Text, text, each.Canonical)
		}
	}
	for _, each := range cases.Invalid {
		if got, err := ParseDuration(each.Text); err == nil {
			t.Errorf("%q: taken as %v", each.Text, got)
		}
	}
	for _, each := range cases.InvalidPeriods {
		period, err := ParseDuration(each.Text)
		if err == nil && Every("job", period, nothing).Err() == nil {
			t.Errorf("%q: taken as a period", each.Text)
		}
	}
}

func TestADurationThatIsNoTextOfOursSaysWhatToWrite(t *testing.T) {
	for text, want := range map[string]string{
		"10":   `a number needs its unit: "10s" is seconds, "10m" minutes`,
		" 10s": "no white space around a duration",
		"1.5h": "no fractions (90m, not 1.5h): write " + grammar,
		"1mo":  "months and years have no fixed length: write days, or a cron expression",
		"1m1h": "write " + grammar,
		"":     "write " + grammar,
	} {
		if _, err := ParseDuration(text); err == nil || err.Error() != want {
			t.Errorf("%q: %v; want %q", text, err, want)
		}
	}
	if _, err := ParseDuration("999999999999d"); err == nil {
		t.Error("longer than a hundred years")
	}
	if got := textOf(90 * time.Minute); got != "1h30m" {
		t.Error(got)
	}
}
