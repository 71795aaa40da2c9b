package io.anarchon.client;

import io.anarchon.v1.Failure;
import io.anarchon.v1.Outcome;
import io.anarchon.v1.Success;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.lang.reflect.Array;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Collection;
import java.util.Iterator;
import java.util.Map;

/** How an attempt ended, out of what its handler returned or threw. */
final class Outcomes {
  static final int RESULT_MAX_BYTES = 16 << 10;
  static final int MESSAGE_MAX_BYTES = 4 << 10;
  static final int TRACE_MAX_BYTES = 16 << 10;

  private Outcomes() {}

  /** Nothing as nothing, a text as it is, all else as JSON, or as Java shows it; cut. */
  static Outcome.Builder of(Object value) {
    String text = "";
    if (value instanceof CharSequence words) {
      text = words.toString();
    } else if (value != null) {
      StringBuilder json = new StringBuilder();
      write(json, value);
      text = json.toString();
    }
    return Outcome.newBuilder()
        .setSuccess(Success.newBuilder().setResult(cut(text, RESULT_MAX_BYTES)));
  }

  /** Never throws, whatever the error's own code does: the attempt would never end. */
  static Outcome.Builder of(Throwable error, Orders orders) {
    boolean isObedience =
        error instanceof InterruptedException || error instanceof CancelledException;
    if (isObedience && orders.isTold()) {
      return Session.stopped(orders.wireReason()).toBuilder();
    }
    boolean isWish = error instanceof Retry || error instanceof Permanent;
    Throwable named = isWish && error.getCause() != null ? error.getCause() : error;
    String message = messageOf(error);
    Failure.Builder failure =
        Failure.newBuilder()
            .setType(cut(named.getClass().getName(), MESSAGE_MAX_BYTES))
            .setMessage(cut(message.isEmpty() ? messageOf(named) : message, MESSAGE_MAX_BYTES))
            .setStackTrace(cutStart(traceOf(error), TRACE_MAX_BYTES))
            .setPermanent(error instanceof Permanent);
    if (error instanceof Retry retry && retry.after() != null) {
      failure.setRetryAfter(Durations.toWire(retry.after()));
    }
    return Outcome.newBuilder().setFailure(failure);
  }

  private static String messageOf(Throwable error) {
    try {
      return error.getMessage() == null ? "" : error.getMessage();
    } catch (RuntimeException | Error broken) {
      return "<an error that cannot be shown>";
    }
  }

  private static String traceOf(Throwable error) {
    StringWriter text = new StringWriter();
    try {
      error.printStackTrace(new PrintWriter(text));
    } catch (RuntimeException | Error broken) {
      text.append("<cannot be shown>");
    }
    return text.toString();
  }

  /** The beginning of a text, cut between characters. */
  static String cut(String text, int maxBytes) {
    byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
    if (bytes.length <= maxBytes) {
      return new String(bytes, StandardCharsets.UTF_8);
    }
    int end = maxBytes;
    while ((bytes[end] & 0xC0) == 0x80) {
      end--;
    }
    return new String(bytes, 0, end, StandardCharsets.UTF_8);
  }

  /** The end of a text, cut between characters. */
  static String cutStart(String text, int maxBytes) {
    ByteBuffer bytes = StandardCharsets.UTF_8.encode(text);
    int start = Math.max(0, bytes.limit() - maxBytes);
    while (start < bytes.limit() && (bytes.get(start) & 0xC0) == 0x80) {
      start++;
    }
    bytes.position(start);
    return StandardCharsets.UTF_8.decode(bytes).toString();
  }

  // ── JSON ────────────────────────────────────────────────────────────────────────────────────

  private static void write(StringBuilder json, Object value) {
    if (value == null || value instanceof Boolean || isFinite(value)) {
      json.append(value);
    } else if (value instanceof Map<?, ?> map) {
      json.append('{');
      Iterator<? extends Map.Entry<?, ?>> entries = map.entrySet().iterator();
      while (entries.hasNext()) {
        Map.Entry<?, ?> entry = entries.next();
        writeText(json, String.valueOf(entry.getKey()));
        json.append(": ");
        write(json, entry.getValue());
        json.append(entries.hasNext() ? ", " : "");
      }
      json.append('}');
    } else if (value instanceof Collection<?> items) {
      json.append('[');
      Iterator<?> each = items.iterator();
      while (each.hasNext()) {
        write(json, each.next());
        json.append(each.hasNext() ? ", " : "");
      }
      json.append(']');
    } else if (value.getClass().isArray()) {
      Object[] items = new Object[Array.getLength(value)];
      for (int i = 0; i < items.length; i++) {
        items[i] = Array.get(value, i);
      }
      write(json, Arrays.asList(items));
    } else {
      writeText(json, String.valueOf(value));
    }
  }

  private static boolean isFinite(Object value) {
    return value instanceof Number number && Double.isFinite(number.doubleValue());
  }

  private static void writeText(StringBuilder json, String text) {
    json.append('"');
    for (char c : text.toCharArray()) {
      if (c == '"' || c == '\\') {
        json.append('\\').append(c);
      } else if (c < ' ') {
        json.append(String.format("\\u%04x", (int) c));
      } else {
        json.append(c);
      }
    }
    json.append('"');
  }
}
