package io.anarchon.client;

import java.time.Duration;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Durations: the text "1h30m", {@link Duration}, and the wire's form. */
public final class Durations {
  private static final String[] UNITS = {"w", "d", "h", "m", "s", "ms"};
  private static final long[] UNITS_MS = {604_800_000, 86_400_000, 3_600_000, 60_000, 1_000, 1};
  private static final Pattern TEXT =
      Pattern.compile(
          "(?:([0-9]{1,12})w)?(?:([0-9]{1,12})d)?(?:([0-9]{1,12})h)?(?:([0-9]{1,12})m(?!s))?"
              + "(?:([0-9]{1,12})s)?(?:([0-9]{1,12})ms)?");
  private static final int LONGEST_TEXT = 64;
  private static final Duration LONGEST = Duration.ofDays(36_600);
  private static final String GRAMMAR =
      "whole numbers with the units w d h m s ms, largest first, each once, as in \"1h30m\"";

  private Durations() {}

  /**
   * Returns what a text such as "90s", "1h30m" or "250ms" means: the form that Anarchon's
   * configuration, command line and other clients have.
   *
   * @throws AnarchonException.WrongJob for anything else, saying what would be right
   */
  public static Duration parse(String text) {
    return parse("duration", text);
  }

  /** As above, of this field. */
  static Duration parse(String field, String text) {
    if (text == null) {
      throw new AnarchonException.WrongJob(field + " null: must be a duration");
    }
    String shown = field + " \"" + text + "\": ";
    Matcher match = TEXT.matcher(text);
    if (text.isEmpty() || text.length() > LONGEST_TEXT || !match.matches()) {
      throw new AnarchonException.WrongJob(shown + whatToWrite(text));
    }
    long total = 0;
    for (int unit = 0; unit < UNITS.length; unit++) {
      if (match.group(unit + 1) != null) {
        long number = Long.parseLong(match.group(unit + 1));
        total += Math.min(number, LONGEST.toMillis() / UNITS_MS[unit] + 1) * UNITS_MS[unit];
      }
    }
    Duration duration = Duration.ofMillis(total);
    if (duration.compareTo(LONGEST) > 0) {
      throw new AnarchonException.WrongJob(
          shown + "a duration cannot be longer than a hundred years");
    }
    return duration;
  }

  private static String whatToWrite(String text) {
    if (text.length() > LONGEST_TEXT) {
      return "a duration has at most " + LONGEST_TEXT + " characters";
    }
    if (!text.equals(text.strip())) {
      return "no white space around a duration";
    }
    if (text.matches("[0-9]+")) {
      return "a number needs its unit: \"" + text + "s\" is seconds, \"" + text + "m\" minutes";
    }
    if (text.matches("[0-9]*[.,][0-9]+[a-z]+")) {
      return "no fractions (90m, not 1.5h): write " + GRAMMAR;
    }
    if (text.matches("[0-9]+(mo|y)")) {
      return "months and years have no fixed length: write days, or a cron expression";
    }
    return "write " + GRAMMAR;
  }

  /** Returns the shortest text that means the duration: "1h30m"; zero is "0s". */
  public static String text(Duration duration) {
    StringBuilder text = new StringBuilder();
    long rest = duration.toMillis();
    for (int unit = 0; unit < UNITS.length; unit++) {
      if (rest >= UNITS_MS[unit]) {
        text.append(rest / UNITS_MS[unit]).append(UNITS[unit]);
        rest %= UNITS_MS[unit];
      }
    }
    return text.isEmpty() ? "0s" : text.toString();
  }

  /** Throws WrongJob unless the duration is whole milliseconds, and not negative. */
  static void check(String field, Duration value) {
    if (value == null) {
      throw new AnarchonException.WrongJob(field + " null: must be a duration");
    }
    String shown = field + " " + value + ": ";
    if (value.isNegative()) {
      throw new AnarchonException.WrongJob(shown + "a duration cannot be negative");
    }
    if (value.compareTo(LONGEST) > 0) {
      throw new AnarchonException.WrongJob(
          shown + "a duration cannot be longer than a hundred years");
    }
    if (value.getNano() % 1_000_000 != 0) {
      throw new AnarchonException.WrongJob(shown + "a duration must be whole milliseconds");
    }
  }

  /** Throws WrongJob unless the duration is whole milliseconds from least to most. */
  static void check(String field, Duration value, Duration least, Duration most) {
    check(field, value);
    if (value.compareTo(least) < 0 || value.compareTo(most) > 0) {
      throw new AnarchonException.WrongJob(
          field + " " + text(value) + ": must be " + text(least) + " to " + text(most));
    }
  }

  static com.google.protobuf.Duration toWire(Duration duration) {
    return com.google.protobuf.Duration.newBuilder()
        .setSeconds(duration.getSeconds())
        .setNanos(duration.getNano())
        .build();
  }

  static long toMillis(com.google.protobuf.Duration wire) {
    return wire.getSeconds() * 1_000 + wire.getNanos() / 1_000_000;
  }
}
