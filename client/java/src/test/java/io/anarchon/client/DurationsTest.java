package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Map;
import org.junit.jupiter.api.Test;

class DurationsTest {
  private static final Path VECTORS = Path.of("../../tests/conformance/vectors/durations.json");

  private static JsonArray cases(String of) throws IOException {
    JsonArray cases =
        JsonParser.parseString(Files.readString(VECTORS)).getAsJsonObject().getAsJsonArray(of);
    assertFalse(cases.isEmpty());
    return cases;
  }

  private static String textOf(JsonElement each) {
    return each.getAsJsonObject().get("text").getAsString();
  }

  @Test
  void aTextMeansWhatTheVectorsSay() throws IOException {
    for (JsonElement each : cases("valid")) {
      JsonObject wanted = each.getAsJsonObject();
      Duration duration = Durations.parse(textOf(each));
      assertEquals(wanted.get("duration_ms").getAsLong(), duration.toMillis(), textOf(each));
      assertEquals(wanted.get("canonical").getAsString(), Durations.text(duration));
    }
    for (JsonElement each : cases("invalid")) {
      String text = textOf(each);
      assertThrows(AnarchonException.WrongJob.class, () -> Durations.parse(text), text);
    }
    for (JsonElement each : cases("invalid_periods")) {
      String text = textOf(each);
      assertThrows(AnarchonException.WrongJob.class, () -> Job.every("job", text), text);
    }
  }

  @Test
  void aTextThatIsNoneSaysWhatToWrite() {
    String grammar =
        "write whole numbers with the units w d h m s ms, largest first, each once, as in \"1h30m\"";
    Map.of(
            "10", "a number needs its unit: \"10s\" is seconds, \"10m\" minutes",
            " 10s", "no white space around a duration",
            "1.5h", "no fractions (90m, not 1.5h): " + grammar,
            "1mo", "months and years have no fixed length: write days, or a cron expression",
            "1m1h", grammar,
            "", grammar,
            "999999999999d", "a duration cannot be longer than a hundred years")
        .forEach(
            (text, words) -> {
              AnarchonException error =
                  assertThrows(AnarchonException.WrongJob.class, () -> Durations.parse(text));
              assertEquals("duration \"" + text + "\": " + words, error.getMessage());
            });
  }
}
